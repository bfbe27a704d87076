"""PTX text -> statements, numbers and source locations: what is known without names."""

from __future__ import annotations

import os
import re
import struct

from .program import NOWHERE, Location


class ParseError(Exception):
    """The text isn't PTX as this parser knows it. Names the statement."""


def top_level(text: str):
    """Yields (head, body or None) of everything at module level."""
    position = 0
    while match := re.compile(r"[^\s;]").search(text, position):
        start = match.start()
        stop = re.compile(r"[;{]").search(text, start)
        if stop is None:
            raise ParseError(f"the module ends inside {text[start : start + 80]!r}")
        head = text[start : stop.start()].strip()
        if stop.group() == "{" and not head.endswith("="):
            end = _closing_brace(text, stop.start())
            yield head, text[stop.end() : end]
            position = end + 1
        else:
            end = text.index(";", start)
            yield text[start:end].strip(), None
            position = end + 1


def _closing_brace(text: str, start: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    raise ParseError("a brace is never closed")


def number(text: str) -> int | None:
    """An immediate's value; floats as their bits."""
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
        return int(match.group(1) or match.group(2), 16)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0)
    return None


def decimal(text: str, modifiers: tuple[str, ...]) -> int | None:
    """A float written with a point, as the bits of the instruction's type, else of f64."""
    if not re.fullmatch(r"-?\d+\.\d*(?:[eE][-+]?\d+)?", text):
        return None
    format = "<f" if "f32" in modifiers else "<d"
    return int.from_bytes(struct.pack(format, float(text)), "little")


def split(text: str) -> list[str]:
    """At the commas that lie in no bracket."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "[{(") - (character in ")}]")
        if character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


class Statements:
    """The statements of a body: instructions and directives without `;`, labels with `:`, scope braces, .loc lines."""

    _TOKEN = re.compile(
        r"\s*(?:(?P<loc>\.loc\b[^\n]*)|(?P<brace>[{}])|(?P<label>[\w$]+)\s*:(?!:)|(?P<statement>[^;]+?)\s*;)", re.S
    )

    def __init__(self, body: str):
        self._body = body.rstrip()

    def __iter__(self):
        position = 0
        while position < len(self._body):
            match = self._TOKEN.match(self._body, position)
            if not match:
                if not self._body[position:].strip(" \t\r\n;"):
                    return
                raise ParseError(f"can't read {self._body[position : position + 80]!r}")
            position = match.end()
            yield match.lastgroup, " ".join(match[match.lastgroup].split())


class Locations:
    """Follows .loc lines. A call site is itself a place that may have been inlined: its latest parent counts."""

    def __init__(self, files: dict[int, str]):
        self._files = {number: os.path.basename(name) for number, name in files.items()}
        self._parents: dict[tuple[int, int, int], tuple[int, int, int] | None] = {}
        self.current = NOWHERE

    def see(self, line: str) -> None:
        here = tuple(int(number) for number in line.split(",")[0].split()[1:4])
        match = re.search(r"inlined_at\s+(\d+)\s+(\d+)\s+(\d+)", line)
        self._parents[here] = tuple(int(number) for number in match.groups()) if match else None
        if here[1] == 0:  # made by the compiler: the line before is the better answer
            return
        frames, seen = [], set()
        place = here
        while place and place not in seen:
            seen.add(place)
            frames.append((self._files.get(place[0], "?"), place[1]))
            place = self._parents.get(place)
        self.current = Location(tuple(frames))
