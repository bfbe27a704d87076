"""A packed folder's list of files, `unweight.json`: what each was, to make it again and to check it."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .container import CHECK_KEY, DIGEST_CHARS, FORMAT, FORMAT_KEY, NO_DIGEST, digest, unzip_text, zip_text
from .errors import CheckpointError, DamagedError, at

NAME = "unweight.json"
LEFT_OUT = (".git",)  # its objects hold every weight once more
KINDS = ("packed", "copied", "edited")
MAX_EDITED = 100_000_000  # bytes of a file that is edited: they are held in memory
_DIGEST_FIELD = f'"{CHECK_KEY}": "'


def _check_digest(value: Any) -> None:
    if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{DIGEST_CHARS}}}", value):
        raise ValueError(f"the digest {value!r}")


@dataclass(frozen=True)
class FileRecord:
    """One file of the original folder.

    `packed`: the stored file is a packed safetensors file, `digest` is the original's `file_digest`. `copied`: stored
    as it was. `edited`: the stored file was changed (it has `stored_digest`) and the original's bytes are kept here.
    """

    kind: str
    size: int
    digest: str
    stored_digest: str | None = None
    original: bytes | None = None

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"kind": self.kind, "size": self.size, "xxh3_128": self.digest}
        if self.original is not None:
            value |= {"stored_xxh3_128": self.stored_digest, "original": zip_text(self.original)}
        return value

    @staticmethod
    def from_json(value: Any) -> "FileRecord":
        """Raises ValueError, KeyError or TypeError."""
        kind, size, hexadecimal = value["kind"], value["size"], value["xxh3_128"]
        if kind not in KINDS or type(size) is not int or size < 0:
            raise ValueError(f"a record of kind {kind!r} and size {size!r}")
        _check_digest(hexadecimal)
        if kind != "edited":
            return FileRecord(kind, size, hexadecimal)
        if size > MAX_EDITED:
            raise ValueError(f"an edited file of {size} bytes, allowed are {MAX_EDITED}")
        _check_digest(value["stored_xxh3_128"])
        original = unzip_text(value["original"], size + 1)
        if len(original) != size or digest(original) != hexadecimal:
            raise ValueError("the kept original doesn't have its size and hash")
        return FileRecord(kind, size, hexadecimal, value["stored_xxh3_128"], original)


@dataclass(frozen=True)
class Manifest:
    layout: str
    files: dict[str, FileRecord]  # by path in the folder, with /
    folders: tuple[str, ...]  # the empty ones

    def to_bytes(self) -> bytes:
        content = {
            FORMAT_KEY: FORMAT,
            CHECK_KEY: NO_DIGEST,
            "layout": self.layout,
            "folders": list(self.folders),
            "files": {name: record.to_json() for name, record in self.files.items()},
        }
        text = json.dumps(content, indent=1).encode() + b"\n"
        position = text.index(_DIGEST_FIELD.encode()) + len(_DIGEST_FIELD)
        return text[:position] + digest(text).encode() + text[position + len(NO_DIGEST) :]


def _safe(name: Any) -> str:
    """A relative path that stays inside its folder, whoever wrote it."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or str(path) != name or "\0" in name:
        raise ValueError(f"the path {name!r}")
    return name


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError if there is none or another version's, DamagedError if it isn't what was written."""
    path = folder / NAME
    if not path.is_file():
        raise CheckpointError(at(folder, f"not a packed checkpoint: it has no {NAME}"))
    data = path.read_bytes()
    try:
        content = json.loads(data)
        if content[FORMAT_KEY] != FORMAT:
            raise CheckpointError(at(path, f"{FORMAT_KEY} {content[FORMAT_KEY]!r}, this version reads {FORMAT!r}"))
        check = content[CHECK_KEY].encode()
        if len(check) != len(NO_DIGEST) or digest(data.replace(check, NO_DIGEST.encode(), 1)).encode() != check:
            raise ValueError(f"its hash isn't {CHECK_KEY}")
        files = {_safe(name): FileRecord.from_json(value) for name, value in content["files"].items()}
        folders = tuple(map(_safe, content["folders"]))
        parents = {str(p) for name in [*files, *folders] for p in PurePosixPath(name).parents}
        if both := files.keys() & {*folders, *parents}:
            raise ValueError(f"the path {min(both)!r} is a file and a folder")
        return Manifest(str(content["layout"]), files, folders)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(at(path, f"damaged: {type(error).__name__}: {error}")) from None


@dataclass(frozen=True)
class Listing:
    files: list[str]
    folders: list[str]  # without anything in them
    left_out: list[str]


def list_folder(root: Path) -> Listing:
    """All files below a folder, through links too, in order of their names."""
    listing = Listing([], [], [])
    _list(root, "", (root.resolve(),), listing)
    return listing


def _list(folder: Path, prefix: str, above: tuple[Path, ...], listing: Listing) -> None:
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda e: e.name)
    if not found and prefix:
        listing.folders.append(prefix.rstrip("/"))
    for entry in found:
        name, path = prefix + entry.name, Path(entry.path)
        if entry.name in LEFT_OUT:
            listing.left_out.append(name)
        elif entry.is_dir():
            real = path.resolve()
            if real in above:
                raise CheckpointError(at(path, f"a link to a folder that it lies in, {real}"))
            _list(path, name + "/", (*above, real), listing)
        elif entry.is_file():
            listing.files.append(name)
        elif not path.exists():
            raise CheckpointError(at(path, f"a link to nothing: {os.readlink(path)}"))
        else:
            raise CheckpointError(at(path, "neither a file nor a folder"))
