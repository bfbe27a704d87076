"""Packed tensors on their way into what `compress_model` left plain."""

from typing import Any

from torch import Tensor, nn

from .packed import unpack


def accept_packed(model: nn.Module) -> None:
    """Makes `model.load_state_dict` unpack what is packed in the state_dict and plain in the model.

    Which weights are packed depends on who packs them: on disk a router of 8 rows pays, as kernels want it it doesn't,
    and convolutions and other parameters are packed on disk alone. Packed modules take their weights themselves.
    """
    if not any(getattr(hook, "hook", None) is _unpack_plain for hook in model._load_state_dict_pre_hooks.values()):
        model.register_load_state_dict_pre_hook(_unpack_plain)


def _unpack_plain(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    plain = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    for key in [k for k in state_dict if k.startswith(prefix) and k.endswith("weight_packed")]:
        name, value = key.removeprefix(prefix), state_dict[key]
        if name in buffers or not isinstance(value, Tensor):
            continue
        # `compress` names them after what they were: `up.weight` becomes `up.weight_packed`, `scale` becomes
        # `scale.weight_packed`.
        for original in (name.removesuffix("_packed"), name.removesuffix(".weight_packed")):
            if original in plain | buffers and prefix + original not in state_dict:
                try:
                    state_dict[prefix + original] = unpack(value)
                    del state_dict[key]
                except (TypeError, ValueError) as error:
                    error_msgs.append(f"{key}: {error}")
                break
