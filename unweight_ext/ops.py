"""The operators of the compiled part, with what they need in Python: fake implementations; derivatives.py has the rest.

    linear(Tensor x, Tensor packed_w, Tensor? bias=None, Tensor? next_w=None, *, int layout=-1, bool exact=False,
           ScalarType? out_dtype=None) -> Tensor
    grouped_linear(Tensor x, Tensor packed_w, Tensor offs, Tensor? bias=None, Tensor? next_w=None, *, int layout=-1,
                   bool exact=False, ScalarType? out_dtype=None) -> Tensor
    linear_many(Tensor x, Tensor[] packed_w, Tensor?[] bias, Tensor? next_w=None, *, int[] layouts=[],
                ScalarType? out_dtype=None) -> Tensor[]
    unpack(Tensor packed_w, int in_features, ScalarType dtype) -> Tensor
    embedding(Tensor ids, Tensor packed_w, int embedding_dim) -> Tensor
    supported_configs(int layout=-1) -> int[]

`linear`: y = x · Wᵀ + bias for x [..., in_features], bfloat16 or float32, and packed_w [out_features, row_bytes].
`grouped_linear`: rows of x [M, in_features] that belong to experts, packed_w [E, out_features, row_bytes]. offs, int32
[E], says where each expert's rows end; they start where the last one's end, as in torch's grouped matmul. Results of
rows behind the last expert's are zeros. bias [E, out_features].
`linear_many`: several weights on the same x, in one launch (q, k and v; gate and up). A bias may be None.
`next_w`: the packed weight [out_features, row_bytes] of the product after this one, if that is `linear` with few rows:
a GPU fetches its first part while this one ends. Only a hint: no result depends on it. But it is read: it has to exist
as long as a CUDA graph that was captured with it.
`layout`: what the weight is known to be (a position in LAYOUTS), or -1. `out_dtype`: float32 gives sums of a bfloat16 x
as they are; else results have the dtype of x. `exact`: F.linear with the unpacked weight, bit for bit.
`supported_configs`: the configurations of the fused kernel, by the rows that each multiplies at once; 0 is the way
through an unpacked weight in scratch memory.

On a GPU, products never wait: what only the device knows to be wrong (damaged bytes, a header of other sizes) gives
NaN, and so does an archive unless `layout` says that it is one. (grouped_linear with `exact` does wait, for offs, and
raises.) A float32 x, archives, and many rows go through scratch memory; grouped_linear takes the first two with `exact`
only.

Operators raise RuntimeError. Fake implementations depend on shapes and dtypes alone, so the operators can be compiled
and captured.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.library import get_ctx, register_fake

try:
    from . import _C  # noqa: F401 (registers the operators)
except ImportError as error:
    raise ImportError(
        f"unweight_ext: its compiled part doesn't load ({error}); "
        "build it in the source folder with `pip install --no-build-isolation .`"
    ) from error

from . import derivatives  # noqa: F401 (registers them)

# Position is the layout's number, in the header and for the operators.
LAYOUTS = ("raw", "huffman", "nibble", "archive")

linear = torch.ops.unweight.linear.default
grouped_linear = torch.ops.unweight.grouped_linear.default
linear_many = torch.ops.unweight.linear_many.default
unpack = torch.ops.unweight.unpack.default
embedding = torch.ops.unweight.embedding.default

_DESCRIBED = 19  # numbers in what `_describe` returns


def _check_device(name: str, tensor: Tensor | None, packed_w: Tensor) -> None:
    # Real tensors of two devices never reach a kernel that could say so, but here meta and captured ones do.
    if tensor is not None:
        torch._check(
            tensor.device == packed_w.device,
            lambda: f"{name}: device {tensor.device}, expected that of packed_w, {packed_w.device}",
        )


@register_fake("unweight::linear")
def _linear_fake(
    x: Tensor,
    packed_w: Tensor,
    bias: Tensor | None = None,
    next_w: Tensor | None = None,
    *,
    layout: int = -1,
    exact: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    # x (..., K), packed_w (N, row_bytes) -> (..., N)
    torch._check(packed_w.dim() == 2, lambda: f"packed_w: {packed_w.dim()} dimensions, expected 2")
    torch._check(x.dim() >= 1, lambda: "x: 0 dimensions, expected at least 1")
    _check_device("x", x, packed_w)
    _check_device("bias", bias, packed_w)
    _check_device("next_w", next_w, packed_w)
    return x.new_empty((*x.shape[:-1], packed_w.shape[0]), dtype=out_dtype or x.dtype)


@register_fake("unweight::_linear_config")
def _linear_config_fake(
    x: Tensor,
    packed_w: Tensor,
    bias: Tensor | None = None,
    *,
    layout: int = -1,
    tokens: int,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return _linear_fake(x, packed_w, bias, layout=layout, out_dtype=out_dtype)


@register_fake("unweight::grouped_linear")
def _grouped_linear_fake(
    x: Tensor,
    packed_w: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    next_w: Tensor | None = None,
    *,
    layout: int = -1,
    exact: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    # x (M, K), packed_w (E, N, row_bytes), offs (E) -> (M, N)
    torch._check(packed_w.dim() == 3, lambda: f"packed_w: {packed_w.dim()} dimensions, expected 3")
    torch._check(x.dim() == 2, lambda: f"x: {x.dim()} dimensions, expected 2")
    for name, tensor in (("x", x), ("offs", offs), ("bias", bias), ("next_w", next_w)):
        _check_device(name, tensor, packed_w)
    return x.new_empty((x.shape[0], packed_w.shape[1]), dtype=out_dtype or x.dtype)


@register_fake("unweight::_grouped_grad")
def _grouped_grad_fake(grad: Tensor, packed_w: Tensor, offs: Tensor, in_features: int) -> Tensor:
    # grad (M, N) -> (M, K)
    return grad.new_empty((grad.shape[0], in_features))


@register_fake("unweight::linear_many")
def _linear_many_fake(
    x: Tensor,
    packed_w: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    next_w: Tensor | None = None,
    *,
    layouts: Sequence[int] = (),
    out_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    # x (..., K), each packed_w (N, row_bytes) -> each (..., N)
    torch._check(
        len(bias) == len(packed_w),
        lambda: f"bias: {len(bias)} of them, expected {len(packed_w)}, one for each packed_w",
    )
    return [_linear_fake(x, w, b, next_w, out_dtype=out_dtype) for w, b in zip(packed_w, bias, strict=True)]


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


# They wait for the GPU: compilers must leave them outside of CUDA graphs. (torch 2.10's stable ABI can't say it.)
WAITING = ("unpack", "_unpack", "_pack", "_transcode", "_resize", "_verify", "_describe", "_grouped_grad")
for _name in WAITING:
    getattr(torch.ops.unweight, _name).default.tags.append(torch.Tag.cudagraph_unsafe)


def supported_configs(layout: int = -1) -> list[int]:
    """The configurations of `linear` on a Hopper GPU for weights of a layout: see the top of this file."""
    return torch.ops.unweight.supported_configs(layout)


def batch_invariant(enabled: bool | None = None) -> bool:
    """Makes every row's result on a GPU independent of the other rows and of their number; says what it was before.

    Up to 64 rows, of all experts together, results always are, and on a CPU for any number. This cuts more rows into
    runs of 64, which read the weight again: slow for many rows; grouped_linear refuses more. It holds for the whole
    process, in compiled code as well, but not for CUDA graphs that exist already. `exact`, float32 and archives are as
    invariant as F.linear. Without `enabled` it only asks.
    """
    if enabled is not None and not isinstance(enabled, bool):
        raise TypeError(f"enabled: {type(enabled).__name__}, expected a bool or None")
    return bool(torch.ops.unweight._batch_invariant(-1 if enabled is None else int(enabled)))


def cpu_capability(level: int = -1) -> int:
    """The instruction set of the CPU code, for tests: 0 portable, 1 AVX-512. `level` changes it, -1 only asks."""
    return torch.ops.unweight._cpu_capability(level)


@cache
def _problem(check: str, index: int) -> str | None:
    try:
        getattr(torch.ops.unweight, check)(index)
    except RuntimeError as error:
        return str(error)
    return None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def cuda_problem(device: torch.device) -> str | None:
    """Why the kernels can't run on a CUDA device: a GPU that is too old, no driver, a build without them; or None."""
    return _problem("_check_cuda", _index(device))


def fused_problem(device: torch.device) -> str | None:
    """Why the fused product can't run on a CUDA device (another GPU than Hopper, or as `cuda_problem`); or None."""
    return _problem("_check_fused", _index(device))
