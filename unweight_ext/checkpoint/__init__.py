"""Checkpoints: `compress_checkpoint`, `decompress_checkpoint`, `verify_checkpoint`, `inspect_checkpoint`.

All of them stream: memory stays within three times the largest tensor + 64 MiB, whatever the model's size.
docs/CHECKPOINT.md describes the files.
"""

from .compress import CompressSummary, compress_checkpoint
from .decompress import DecompressSummary, decompress_checkpoint
from .errors import CheckpointError, DamagedError
from .inspection import Inspection, TensorReport, inspect_checkpoint
from .verify import VerifySummary, verify_checkpoint

__all__ = [
    "CheckpointError",
    "CompressSummary",
    "DamagedError",
    "DecompressSummary",
    "Inspection",
    "TensorReport",
    "VerifySummary",
    "compress_checkpoint",
    "decompress_checkpoint",
    "inspect_checkpoint",
    "verify_checkpoint",
]
