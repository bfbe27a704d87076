"""The operators of the compiled part, with what they need in Python: fake implementations and gradients.

    unweight::linear(Tensor x, Tensor packed_w, Tensor? bias=None, *, int layout=-1, bool exact=False) -> Tensor
    unweight::unpack(Tensor packed_w, int in_features, ScalarType dtype) -> Tensor
    unweight::embedding(Tensor ids, Tensor packed_w, int embedding_dim) -> Tensor

Operators raise RuntimeError. Fake implementations depend on shapes and dtypes alone, so the operators can be compiled
and captured.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.library import Library, get_ctx, register_autograd, register_fake

try:  # What register_autograd registers. Not public, so it may go some day; forward-mode derivatives go with it.
    from torch._library.autograd import Info, make_autograd_impl
except ImportError:
    make_autograd_impl = None

try:
    from . import _C  # noqa: F401 (registers the operators)
except ImportError as error:
    raise ImportError(
        f"unweight_ext: its compiled part doesn't load ({error}); "
        "build it in the source folder with `pip install --no-build-isolation .`"
    ) from error

# Position is the layout's number, in the header and for the operators.
LAYOUTS = ("raw", "huffman", "nibble", "archive")

linear = torch.ops.unweight.linear.default
unpack = torch.ops.unweight.unpack.default
embedding = torch.ops.unweight.embedding.default

_DESCRIBED = 19  # numbers in what `_describe` returns


def _check_device(name: str, tensor: Tensor, packed_w: Tensor) -> None:
    # Real tensors of two devices never reach a kernel that could say so, but here meta and captured ones do.
    torch._check(
        tensor.device == packed_w.device,
        lambda: f"{name}: device {tensor.device}, expected that of packed_w, {packed_w.device}",
    )


@register_fake("unweight::linear")
def _linear_fake(
    x: Tensor, packed_w: Tensor, bias: Tensor | None = None, *, layout: int = -1, exact: bool = False
) -> Tensor:
    # x (..., K), packed_w (N, row_bytes) -> (..., N)
    torch._check(packed_w.dim() == 2, lambda: f"packed_w: {packed_w.dim()} dimensions, expected 2")
    torch._check(x.dim() >= 1, lambda: "x: 0 dimensions, expected at least 1")
    _check_device("x", x, packed_w)
    if bias is not None:
        _check_device("bias", bias, packed_w)
    return x.new_empty((*x.shape[:-1], packed_w.shape[0]))


@register_fake("unweight::unpack")
def _unpack_fake(packed_w: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    # packed_w (..., N, row_bytes) -> (..., N, K)
    return packed_w.new_empty((*packed_w.shape[:-1], in_features), dtype=dtype)


@register_fake("unweight::_unpack")
def _unpack_with_fake(packed_w: Tensor, in_features: int, threads: int) -> Tensor:
    return _unpack_fake(packed_w, in_features, torch.bfloat16)


@register_fake("unweight::embedding")
def _embedding_fake(ids: Tensor, packed_w: Tensor, embedding_dim: int) -> Tensor:
    # ids (...), packed_w (N, row_bytes) -> (..., embedding_dim)
    _check_device("ids", ids, packed_w)
    return packed_w.new_empty((*ids.shape, embedding_dim), dtype=torch.bfloat16)


@register_fake("unweight::_pack")
def _pack_fake(weight: Tensor, layout: int, shape: list[int], threads: int) -> Tensor:
    row_bytes = get_ctx().new_dynamic_size()  # depends on the values
    return weight.new_empty((*weight.shape[:-1], row_bytes), dtype=torch.uint8)


@register_fake("unweight::_transcode")
def _transcode_fake(packed_w: Tensor, layout: int, threads: int) -> Tensor:
    row_bytes = get_ctx().new_dynamic_size()
    return packed_w.new_empty((*packed_w.shape[:-1], row_bytes))


@register_fake("unweight::_resize")
def _resize_fake(packed_w: Tensor, row_bytes: int) -> Tensor:
    return packed_w.new_empty((*packed_w.shape[:-1], row_bytes))


@register_fake("unweight::_verify")
def _verify_fake(packed_w: Tensor) -> None:
    return None


@register_fake("unweight::_describe")
def _describe_fake(packed_w: Tensor) -> Tensor:
    return torch.empty((_DESCRIBED,), dtype=torch.int64, device="cpu")


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    x, packed_w, bias = inputs
    ctx.save_for_backward(packed_w)
    ctx.in_features = x.shape[-1]
    ctx.bias_dtype = None if bias is None else bias.dtype


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # grad (..., N) -> grad_x (..., K), none for the weight, grad_bias (N)
    (packed_w,) = ctx.saved_tensors
    grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)  # 2 where the call gave no bias
    if ctx.needs_input_grad[0]:
        weight = torch.ops.unweight.unpack(packed_w, ctx.in_features, torch.bfloat16)  # (N, K)
        grads[0] = grad @ weight.to(grad.dtype)
    if any(ctx.needs_input_grad[2:]):
        grads[2] = grad.sum_to_size(packed_w.shape[0]).to(ctx.bias_dtype)
    return tuple(grads)


def _linear_autograd(
    keys: Any, x: Tensor, packed_w: Tensor, bias: Tensor | None = None, **options: int | bool
) -> Tensor:
    """Reverse mode as register_autograd does it, which gives zeros in forward mode without a word; and forward mode."""
    x_plain, x_tangent = unpack_dual(x)
    bias_plain, bias_tangent = (None, None) if bias is None else unpack_dual(bias)
    if x_tangent is None and bias_tangent is None:
        return _linear_reverse(keys, x, packed_w, bias, **options)
    y = linear(x_plain, packed_w, bias_plain, **options)
    if x_tangent is None:
        return make_dual(y, bias_tangent.expand_as(y))
    return make_dual(y, linear(x_tangent, packed_w, bias_tangent, **options))


def _linear_autocast(
    x: Tensor, packed_w: Tensor, bias: Tensor | None = None, *, layout: int = -1, exact: bool = False
) -> Tensor:
    # As F.linear under autocast; x and bias become BF16, whatever half precision is asked for: there is one only.
    # (torch.library.register_autocast can't do it: it knows no keyword arguments.)
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        bias = bias if bias is None else bias.to(torch.bfloat16)
        return linear(x.to(torch.bfloat16), packed_w, bias, layout=layout, exact=exact)


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)
_library = Library("unweight", "IMPL")
if make_autograd_impl is None:
    register_autograd("unweight::linear", _linear_backward, setup_context=_linear_setup)
else:
    _linear_reverse = make_autograd_impl(linear, Info(_linear_backward, _linear_setup))
    _library.impl("linear", _linear_autograd, "Autograd", with_keyset=True)
_library.impl("linear", _linear_autocast, "AutocastCPU")
_library.impl("linear", _linear_autocast, "AutocastCUDA")


def cpu_capability(level: int = -1) -> int:
    """The instruction set of the CPU code, for tests: 0 portable, 1 AVX-512. `level` changes it, -1 only asks."""
    return torch.ops.unweight._cpu_capability(level)


@cache
def _cuda_problem(index: int) -> str | None:
    try:
        torch.ops.unweight._check_cuda(index)
    except RuntimeError as error:
        return str(error)
    return None


def cuda_problem(device: torch.device) -> str | None:
    """Why the kernels can't run on a CUDA device: another GPU than Hopper, no driver, a build without them; or None."""
    return _cuda_problem(torch.cuda.current_device() if device.index is None else device.index)
