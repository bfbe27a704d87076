"""Lossless compression of BF16 model weights that run compressed.

Importing the package registers the operators `torch.ops.unweight.*`; everything else is loaded when it is first used.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_HOMES = {
    "pack": "packed",
    "unpack": "packed",
    "transcode": "packed",
    "verify": "packed",
    "info": "packed",
    "pad_row_bytes": "packed",
    "PackedInfo": "packed",
    "LayoutFallback": "packed",
    "batch_invariant": "ops",
    "Linear": "nn",
    "Embedding": "nn",
    "compress_model": "convert",
    "CompressReport": "convert",
    "chain": "chaining",
    "load_tuned": "tuning.table",
    "forget_tuned": "tuning.table",
    "compress_checkpoint": "checkpoint",
    "decompress_checkpoint": "checkpoint",
    "verify_checkpoint": "checkpoint",
    "inspect_checkpoint": "checkpoint",
}

__all__ = [*_HOMES, "__version__"]

# In a source tree that isn't built yet, the pure Python parts (the reference) stay usable; the rest says what to do.
# The command loads the operators, and torch with them, only when it needs them.
if find_spec(f"{__name__}._C") is not None and "unweight_ext_command" not in sys.modules:
    from . import ops as ops


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            value: Any = version("unweight-ext")
        except PackageNotFoundError as error:
            raise AttributeError("unweight_ext isn't installed, so its version isn't known: pip install .") from error
    elif name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    elif name in _HOMES.values():
        return import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
