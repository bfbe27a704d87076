"""What can be wrong with a checkpoint."""

from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint, an argument or an output that can't be used. The message says where and what is wrong."""


class DamagedError(CheckpointError):
    """Stored bytes are not what was written: a checksum or a hash differs, or something is missing."""


def at(path: Path | str, what: str) -> str:
    """The form of all messages: where, then what."""
    return f"{path}: {what}"
