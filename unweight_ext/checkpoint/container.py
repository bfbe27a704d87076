"""A packed safetensors file: an ordinary one, whose metadata also says how to make the original file from it.

docs/CHECKPOINT.md describes the format.
"""

import base64
import binascii
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import xxhash

from .errors import CheckpointError, DamagedError, at
from .safetensors_io import MAX_HEADER, METADATA, Entry, Header, header_text, parse_header

FORMAT = "0"
PREFIX = "unweight."
FORMAT_KEY, CHECK_KEY, LAYOUT_KEY = "unweight.format", "unweight.check", "unweight.layout"
HEADER_KEY, DIGESTS_KEY, NAMES_KEY = "unweight.header", "unweight.digests", "unweight.names"

DIGEST_CHARS = 32  # xxh3_128 in hex
NO_DIGEST = "0" * DIGEST_CHARS
ALIGNMENT = 128  # of the data's start; a packed matrix that starts at such a byte can be used where it lies


def digest(data: bytes | memoryview) -> str:
    """xxh3_128 in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(header: Header, digests: dict[str, str]) -> str:
    """Identifies a whole safetensors file: xxh3_128 of what precedes the data and the digests of its tensors.

    The header fixes where each tensor lies and leaves no holes, so nothing of the file is left out, and tensors can be
    hashed in any order.
    """
    whole = xxhash.xxh3_128(header.prefix)
    for entry in header.in_file_order():
        whole.update(bytes.fromhex(digests[entry.name]))
    return whole.hexdigest()


def zip_text(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def unzip_text(text: str, limit: int = MAX_HEADER) -> bytes:
    """Undoes `zip_text`, for at most `limit` bytes. Raises ValueError."""
    unzip = zlib.decompressobj()
    try:
        data = unzip.decompress(base64.b64decode(text, validate=True), limit)
    except (zlib.error, binascii.Error) as error:
        raise ValueError(str(error)) from None
    if not unzip.eof or unzip.unused_data:
        raise ValueError("the compressed text is incomplete or too long")
    return data


def packed_name(name: str, taken: set[str]) -> str:
    """The name that a packed tensor is stored under. It always ends in `weight_packed`."""
    plain = f"{name}_packed" if name.endswith("weight") else f"{name}.weight_packed"
    candidate, n = plain, 0
    while candidate in taken:
        n += 1
        candidate = f"{name}.{n}.weight_packed"
    return candidate


def default_original(stored: str) -> str:
    """The original name that a stored name has unless the metadata says otherwise."""
    return stored.removesuffix("_packed") if stored.endswith("weight_packed") else stored


def matrix_shape(shape: tuple[int, ...], stacked: bool) -> tuple[int, ...]:
    """(N, K) or, stacked, (E, N, K) of a tensor."""
    if stacked:
        return shape
    columns = 1
    for d in shape[1:]:
        columns *= d
    return shape[0], columns


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a packed file beside what it was."""

    original: Entry
    stored: Entry
    digest: str  # of the original bytes

    @property
    def packed(self) -> bool:
        return self.stored.dtype == "U8" and self.stored.name != self.original.name


@dataclass(frozen=True)
class PackedFile:
    """The header of a packed file, checked."""

    header: Header
    original: Header
    layout: str
    tensors: tuple[Stored, ...]  # in the order of the stored data

    @property
    def digest(self) -> str:
        """`file_digest` of the original file."""
        return file_digest(self.original, {t.original.name: t.digest for t in self.tensors})


def is_packed(header: Header) -> bool:
    return FORMAT_KEY in header.metadata


def build_header(original: Header, layout: str, tensors: list[Stored]) -> bytes:
    """The header text of a packed file, without padding and with an empty check. `tensors` in the order of the data."""
    digests = {t.original.name: t.digest for t in tensors}
    names = {t.stored.name: t.original.name for t in tensors if default_original(t.stored.name) != t.original.name}
    metadata = {
        **original.metadata,
        FORMAT_KEY: FORMAT,
        CHECK_KEY: NO_DIGEST,
        LAYOUT_KEY: layout,
        HEADER_KEY: zip_text(original.text),
        DIGESTS_KEY: "".join(digests[e.name] for e in original.entries),
    }
    if names:
        metadata[NAMES_KEY] = json.dumps(names, separators=(",", ":"), ensure_ascii=False)
    return header_text(metadata, [t.stored for t in tensors])


def seal_header(text: bytes, length: int) -> bytes:
    """Pads a header's text with spaces to `length` and fills in its check."""
    if len(text) > length:
        raise AssertionError(f"a header of {len(text)} bytes in room for {length}")
    text = text.ljust(length)
    field = f'"{CHECK_KEY}":"'.encode()
    position = text.index(field + NO_DIGEST.encode()) + len(field)
    return text[:position] + digest(text).encode() + text[position + DIGEST_CHARS :]


def _check_of(path: Path | str, text: bytes, found: str) -> None:
    if len(found) != DIGEST_CHARS or text.count(found.encode()) != 1:
        raise DamagedError(at(path, f"the header is damaged: {CHECK_KEY} is {found[:40]!r}"))
    expected = digest(text.replace(found.encode(), NO_DIGEST.encode()))
    if found != expected:
        raise DamagedError(at(path, f"the header is damaged: its hash is {expected}, {CHECK_KEY} says {found}"))


def parse_packed(path: Path | str, header: Header) -> PackedFile:
    """What a packed file's header says. Raises CheckpointError, or DamagedError if it isn't what was written."""
    metadata = header.metadata
    if metadata.get(FORMAT_KEY) != FORMAT:
        raise CheckpointError(at(path, f"{FORMAT_KEY} {metadata.get(FORMAT_KEY)!r}, this version reads {FORMAT!r}"))
    _check_of(path, header.text, metadata.get(CHECK_KEY, ""))
    # From here on the header is what compress wrote, or made by someone who can hash: still no wrong bytes, no crash.
    try:
        original = parse_header(f"{path} (its {HEADER_KEY})", unzip_text(metadata[HEADER_KEY]))
        names = json.loads(metadata.get(NAMES_KEY, "{}"))
        digests = metadata[DIGESTS_KEY]
        layout = metadata[LAYOUT_KEY]
        if not isinstance(names, dict) or len(digests) != DIGEST_CHARS * len(original.entries):
            raise ValueError(f"{NAMES_KEY} or {DIGESTS_KEY} doesn't fit the original header")
        if not re.fullmatch("[0-9a-f]*", digests):
            raise ValueError(f"{DIGESTS_KEY} isn't hexadecimal")
    except KeyError as error:
        raise DamagedError(at(path, f"no {error.args[0]!r} in {METADATA}")) from None
    except CheckpointError as error:  # says itself where
        raise DamagedError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(at(path, f"the metadata is damaged: {error}")) from None
    by_name = {e.name: (e, digests[DIGEST_CHARS * i :][:DIGEST_CHARS]) for i, e in enumerate(original.entries)}
    tensors = []
    for entry in header.in_file_order():
        name = names.get(entry.name, default_original(entry.name))
        if not isinstance(name, str) or name not in by_name:
            raise DamagedError(at(path, f"tensor {entry.name!r} isn't one of the original file's"))
        tensor = Stored(by_name[name][0], entry, by_name.pop(name)[1])
        _check_stored(path, tensor)
        tensors.append(tensor)
    if by_name:
        raise DamagedError(at(path, f"tensor {next(iter(by_name))!r} of the original file is missing"))
    return PackedFile(header, original, layout, tuple(tensors))


def _check_stored(path: Path | str, tensor: Stored) -> None:
    old, new = tensor.original, tensor.stored
    if not tensor.packed:
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            raise DamagedError(
                at(path, f"tensor {new.name!r}: {new.dtype} {list(new.shape)}, expected {old.dtype} {list(old.shape)}")
            )
        return
    stacked = len(new.shape) == 3
    fits = (
        old.dtype == "BF16"
        and len(old.shape) >= 2
        and 0 < old.numel <= new.nbytes  # no layout takes less than a byte for a weight's sign and mantissa
        and len(new.shape) in (2, 3)
        and (not stacked or len(old.shape) == 3)
        and new.shape[:-1] == matrix_shape(old.shape, stacked)[:-1]
    )
    if not fits:
        raise DamagedError(
            at(path, f"tensor {new.name!r}: U8 {list(new.shape)} can't hold {old.dtype} {list(old.shape)}")
        )
