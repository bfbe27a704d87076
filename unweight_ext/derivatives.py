"""Derivatives of the products, and autocast. Gradients reach x and the biases, never a weight.

Backward passes unpack the weight, which waits for a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.library import Library, register_autograd

try:  # What register_autograd registers. Not public, so it may go some day; forward-mode derivatives go with it.
    from torch._library.autograd import Info, make_autograd_impl
except ImportError:
    make_autograd_impl = None

_Function = Callable[..., Tensor]
_ops = torch.ops.unweight
_library = Library("unweight", "IMPL")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def _is_dual(tensor: Tensor | None) -> bool:
    return tensor is not None and unpack_dual(tensor).tangent is not None


# ----------------------------------------------------------------------------------------------------- linear, backward


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    x, packed_w, bias, _next_w = inputs
    ctx.save_for_backward(packed_w)
    ctx.in_features, ctx.x_dtype = x.shape[-1], x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # grad (..., N) -> grad_x (..., K), none for the weight, grad_bias (N)
    (packed_w,) = ctx.saved_tensors
    grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)  # as many as the call gave
    if ctx.needs_input_grad[0]:
        weight = _ops.unpack(packed_w, ctx.in_features, torch.bfloat16)  # (N, K)
        grads[0] = (grad @ weight.to(grad.dtype)).to(ctx.x_dtype)
    if any(ctx.needs_input_grad[2:3]):
        grads[2] = grad.sum_to_size(packed_w.shape[0]).to(ctx.bias_dtype)
    return tuple(grads)


# --------------------------------------------------------------------------------------------- grouped_linear, backward


def _expert_of_rows(offs: Tensor, rows: int) -> Tensor:
    """int64 [rows]; the number of experts for rows that belong to none."""
    return torch.searchsorted(offs, torch.arange(rows, device=offs.device, dtype=offs.dtype), right=True)


def _grouped_setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    x, packed_w, offs, bias, _next_w = inputs
    ctx.save_for_backward(packed_w, offs)
    ctx.in_features, ctx.x_dtype = x.shape[-1], x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _grouped_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # grad (M, N) -> grad_x (M, K), none for weights and offs, grad_bias (E, N)
    packed_w, offs = ctx.saved_tensors
    grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    if ctx.needs_input_grad[0]:
        grads[0] = _ops._grouped_grad(grad, packed_w, offs, ctx.in_features).to(ctx.x_dtype)
    if any(ctx.needs_input_grad[3:4]):
        experts = torch.arange(packed_w.shape[0], device=offs.device)
        members = experts[:, None] == _expert_of_rows(offs, grad.shape[0])  # (E, M)
        grads[3] = (members.to(grad.dtype) @ grad).to(ctx.bias_dtype)
    return tuple(grads)


def _grouped_grad(grad: Tensor, packed_w: Tensor, offs: Tensor, in_features: int) -> Tensor:
    """grad (M, N) times each expert's weight (N, K), zeros for rows of none. An operator, so that it isn't traced."""
    weights = _ops.unpack(packed_w, in_features, torch.bfloat16)
    result, begin = grad.new_zeros((grad.shape[0], in_features)), 0
    for weight, end in zip(weights, offs.tolist(), strict=True):
        result[begin:end] = grad[begin:end] @ weight.to(grad.dtype)
        begin = end
    return result


_library.impl("_grouped_grad", _grouped_grad, "CompositeExplicitAutograd")


# --------------------------------------------------------------------------------------------------------- forward mode


def _linear_bias_alone(y: Tensor, tangent: Tensor) -> Tensor:
    return tangent.to(y.dtype).expand_as(y)


def _grouped_bias_alone(y: Tensor, tangent: Tensor, offs: Tensor) -> Tensor:
    rows = torch.cat([tangent, tangent.new_zeros((1, tangent.shape[1]))])  # (E + 1, N)
    return rows[_expert_of_rows(offs, y.shape[0])].to(y.dtype)


def _with_forward_mode(op: Any, reverse: _Function, bias_alone: _Function) -> _Function:
    """Reverse mode as register_autograd does it, which gives zeros in forward mode without a word; and forward mode.

    `bias_alone`: the tangent of the result where x has none.
    """
    before_bias = [argument.name for argument in op._schema.arguments].index("bias")

    def call(keys: Any, x: Tensor, packed_w: Tensor, *rest: Tensor | None, **options: Any) -> Tensor:
        *offs, bias = (*rest, None)[: before_bias - 1]  # behind it next_w, which a tangent's product doesn't need
        if not _is_dual(x) and not _is_dual(bias):
            return reverse(keys, x, packed_w, *rest, **options)
        x_plain, x_tangent = unpack_dual(x)
        bias_plain, bias_tangent = (None, None) if bias is None else unpack_dual(bias)
        y = op(x_plain, packed_w, *offs, bias_plain, **options)
        if x_tangent is None:
            return make_dual(y, bias_alone(y, bias_tangent, *offs))
        return make_dual(y, op(x_tangent, packed_w, *offs, bias_tangent, **options))

    return call


# ---------------------------------------------------------------------------------------------------------- linear_many


def _linear_many_autograd(
    keys: Any,
    x: Tensor,
    packed_w: list[Tensor],
    bias: list[Tensor | None],
    next_w: Tensor | None = None,
    *,
    layouts: tuple[int, ...] = (),
    out_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Where derivatives are wanted: as many calls of `linear`, which knows them."""
    inputs = [t for t in (x, *bias) if t is not None]
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    if not wanted and not any(map(_is_dual, inputs)):
        with torch._C._AutoDispatchBelowAutograd():
            below = keys & torch._C._after_autograd_keyset
            return _ops.linear_many.default.redispatch(
                below, x, packed_w, bias, next_w, layouts=layouts, out_dtype=out_dtype
            )
    if len(bias) != len(packed_w) or len(layouts) not in (0, len(packed_w)):
        raise RuntimeError(f"bias, layouts: {len(bias)}, {len(layouts)} of them, expected {len(packed_w)} of each")
    known = layouts or [-1] * len(packed_w)
    return [
        _ops.linear(x, w, b, next_w, layout=layout, out_dtype=out_dtype)
        for w, b, layout in zip(packed_w, bias, known, strict=True)
    ]


# ------------------------------------------------------------------------------------------------------------- autocast


def _autocast(op: Any) -> Callable[..., Any]:
    """As F.linear under autocast; x and bias become BF16, whatever half precision is asked for: there is one only.

    (torch.library.register_autocast can't do it: it knows no keyword arguments.)
    """
    names = [argument.name for argument in op._schema.arguments]

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(torch.bfloat16)
        return [each if each is None else each.to(torch.bfloat16) for each in value] if value is not None else None

    def call(*arguments: Any, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            changed = (cast(a) if name in ("x", "bias") else a for name, a in zip(names, arguments, strict=False))
            return op(*changed, **options)

    return call


_REVERSE = {
    "linear": (_linear_backward, _linear_setup, _linear_bias_alone),
    "grouped_linear": (_grouped_backward, _grouped_setup, _grouped_bias_alone),
}

for _name, (_backward, _setup, _alone) in _REVERSE.items():
    if make_autograd_impl is None:
        register_autograd(f"unweight::{_name}", _backward, setup_context=_setup)
    else:
        _op = getattr(_ops, _name).default
        _reverse = make_autograd_impl(_op, Info(_backward, _setup))
        _library.impl(_name, _with_forward_mode(_op, _reverse, _alone), "Autograd", with_keyset=True)
_library.impl("linear_many", _linear_many_autograd, "Autograd", with_keyset=True)
for _name in (*_REVERSE, "linear_many"):
    for _key in ("AutocastCPU", "AutocastCUDA"):
        _library.impl(_name, _autocast(getattr(_ops, _name).default), _key)
