"""Reads nvdisasm's text of a cubin: kernels, their loops, and what one round of a hot loop issues on which pipe."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cuda_toolkit import ToolkitError, find_program


@dataclass(frozen=True)
class Instruction:
    predicate: str  # "@!P0", or empty
    opcode: str  # with its modifiers: LDS.128
    operands: str

    @property
    def base(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def target(self) -> str | None:
        """The label of a jump. BSSY and WARPSYNC name one too, where lanes meet again; BRA.DIV is taken by lanes that
        come apart to a warp-wide instruction, which ours never do."""
        jumps = self.base == "BRA" and not self.opcode.startswith("BRA.DIV")
        found = re.search(r"`\((\.L\S*?)\)", self.operands) if jumps else None
        return found[1] if found else None

    @property
    def falls_through(self) -> bool:
        if self.base == "BRA":  # also `BRA P1, label`
            return bool(self.predicate) or self.target is None or "," in self.operands
        return self.base not in ("EXIT", "RET", "BRX", "JMX") or bool(self.predicate)


# Which pipe issues what on Hopper, after DESIGN's rates; what isn't named here runs on the ALU.
PIPES = {
    "FMA-heavy": ("IMAD", "IDP", "IMUL"),
    "FMA": ("FFMA", "FMUL", "FADD", "HFMA2", "HMUL2", "HADD2"),
    "LSU": ("LDS", "STS", "LDG", "STG", "LD", "ST", "LDL", "STL", "LDSM", "STSM", "SHFL", "ATOMS", "ATOMG", "ATOM"),
    "async": ("SYNCS", "UBLKCP", "UBLKPF", "UBLKRED", "FENCE", "MEMBAR", "CCTL", "CCTLL", "ERRBAR", "RED", "REDG"),
    "XU": ("POPC", "FLO", "BREV", "I2F", "F2I", "F2F", "MUFU"),
    "tensor": ("HGMMA", "IGMMA", "QGMMA", "HMMA", "WARPGROUP"),
    "control": (
        *("BRA", "BRX", "EXIT", "RET", "CALL", "BSSY", "BSYNC", "BREAK", "WARPSYNC", "BAR", "DEPBAR", "NOP"),
        *("YIELD", "NANOSLEEP", "VOTE", "VOTEU", "ELECT", "BMOV", "LDGDEPBAR", "CS2R", "S2R", "LDC"),
    ),
}
PIPE_NAMES = ("ALU", *PIPES, "uniform")
_PIPE_OF = {base: pipe for pipe, bases in PIPES.items() for base in bases}


def pipe_of(instruction: Instruction) -> str:
    base = instruction.base
    if base in _PIPE_OF:
        return _PIPE_OF[base]
    return "uniform" if base.startswith("U") or base in ("R2UR", "S2UR") else "ALU"


@dataclass
class Block:
    instructions: list[Instruction]
    successors: list[int]


@dataclass(frozen=True)
class Loop:
    header: int
    blocks: frozenset[int]


@dataclass(frozen=True)
class Kernel:
    """A kernel's blocks: 0 is its start, successors are indices."""

    name: str
    blocks: tuple[Block, ...]

    def instructions(self) -> Iterable[Instruction]:
        return (instruction for block in self.blocks for instruction in block.instructions)

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops; those that share a header are one."""
        dominators = self._dominators()
        bodies: dict[int, set[int]] = {}
        for tail, block in enumerate(self.blocks):
            for header in block.successors:
                if header in dominators[tail]:
                    bodies.setdefault(header, {header}).update(self._reaching(tail, header))
        return [Loop(header, frozenset(body)) for header, body in bodies.items()]

    def _predecessors(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.blocks]
        for index, block in enumerate(self.blocks):
            for successor in block.successors:
                found[successor].append(index)
        return found

    def _dominators(self) -> list[set[int]]:
        everything = set(range(len(self.blocks)))
        dominators = [{0}] + [everything] * (len(self.blocks) - 1)
        predecessors, changed = self._predecessors(), True
        while changed:
            changed = False
            for index in range(1, len(self.blocks)):
                before = [dominators[p] for p in predecessors[index]]
                new = {index} | (set.intersection(*before) if before else set())
                if before and new != dominators[index]:
                    dominators[index], changed = new, True
        # What nothing leads to has no loop of its own.
        return [d if d != everything or len(everything) == 1 else set() for d in dominators]

    def _reaching(self, tail: int, header: int) -> set[int]:
        found, todo, predecessors = {header}, [tail], self._predecessors()
        while todo:
            index = todo.pop()
            if index not in found:
                found.add(index)
                todo += predecessors[index]
        return found


def parse(text: str) -> dict[str, Kernel]:
    """The kernels in the output of `nvdisasm -c`."""
    kernels = {}
    parts = re.split(r"^\.text\.(\S+):$", text, flags=re.MULTILINE)
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        kernels[name] = Kernel(name, _blocks(body.split("\n\t.section")[0]))
    return kernels


def _blocks(text: str) -> tuple[Block, ...]:
    starts: dict[str, int] = {}
    blocks = [Block([], [])]
    jumps: list[str | None] = []
    fresh = True
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L\S*):", line):
            if not fresh:
                blocks.append(Block([], []))
            starts[label[1]], fresh = len(blocks) - 1, True
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(@!?\w+)?\s*([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;", line):
            if not fresh and (blocks[-1].instructions[-1].target or not blocks[-1].instructions[-1].falls_through):
                blocks.append(Block([], []))
            blocks[-1].instructions.append(Instruction(found[1] or "", found[2], found[3]))
            fresh = False
    for index, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else None
        jumps.append(last.target if last else None)
        if (last is None or last.falls_through) and index + 1 < len(blocks):
            block.successors.append(index + 1)
    for block, target in zip(blocks, jumps, strict=True):
        if target in starts and starts[target] not in block.successors:
            block.successors.append(starts[target])
    return tuple(blocks)


def hot_loop(kernel: Kernel, anchor: str) -> Loop:
    """The innermost loop with most instructions whose opcode starts with `anchor`. Raises ValueError without one."""
    anchors = {loop: sum(_anchors(kernel.blocks[index], anchor) for index in loop.blocks) for loop in kernel.loops}
    with_anchor = [loop for loop, count in anchors.items() if count]
    inner = [loop for loop in with_anchor if not any(other.blocks < loop.blocks for other in with_anchor)]
    if not inner:
        raise ValueError(f"{kernel.name}: no loop holds {anchor}")
    return max(inner, key=lambda loop: anchors[loop])


def _anchors(block: Block, anchor: str) -> int:
    return sum(instruction.opcode.startswith(anchor) for instruction in block.instructions)


def hot_path(kernel: Kernel, loop: Loop, anchor: str) -> list[Instruction]:
    """The instructions of `hot_way`."""
    return [i for index in hot_way(kernel, loop, anchor) for i in kernel.blocks[index].instructions]


def hot_way(kernel: Kernel, loop: Loop, anchor: str) -> list[int]:
    """The blocks of one round of a loop as it mostly runs: the way with most anchors; of those the one around most of
    what is rare, inner loops (repairs, waits), reports by atomics and naps (ptx::rare); and of those the longest. What
    is rare is left out."""
    inner = [other for other in kernel.loops if other.blocks < loop.blocks]
    # Each block's node: itself, or the header of the outermost inner loop that it belongs to.
    node_of = {index: index for index in loop.blocks}
    for other in sorted(inner, key=lambda other: len(other.blocks)):
        node_of.update(dict.fromkeys(other.blocks, other.header))
    members: dict[int, list[int]] = {}
    for index, node in node_of.items():
        members.setdefault(node, []).append(index)

    def score(node: int) -> tuple[int, int, int]:
        block = kernel.blocks[node]
        reports = any(i.base in ("RED", "REDG", "ATOMG", "NANOSLEEP") for i in block.instructions)
        if len(members[node]) > 1 or node in {other.header for other in inner}:
            return 0, -1, 0
        return (
            (0, -1, 0)
            if reports and not _anchors(block, anchor)
            else (_anchors(block, anchor), 0, len(block.instructions))
        )

    Way = tuple[tuple[int, int, int], tuple[int, ...]]
    known: dict[int, Way | None] = {}

    def best(node: int) -> Way | None:
        """From a node to the next round; None if there is no way."""
        if node in known:
            return known[node]
        known[node] = None  # until it is known: a way never comes back to it
        ways: list[Way] = []
        for successor in {s for index in members[node] for s in kernel.blocks[index].successors}:
            if successor == loop.header:
                ways.append(((0, 0, 0), ()))
            elif successor in loop.blocks and node_of[successor] != node:
                way = best(node_of[successor])
                if way is not None:
                    ways.append(way)
        if ways:
            rest, nodes = max(ways)
            own = score(node)
            known[node] = (own[0] + rest[0], own[1] + rest[1], own[2] + rest[2]), (node, *nodes)
        return known[node]

    way = best(loop.header)
    assert way is not None, "a loop leads back to its header"
    return [node for node in way[1] if score(node)[1] == 0]


@dataclass(frozen=True)
class Detour:
    """A part of a loop beside its hot way: what is issued at most, by pipe."""

    once: Counter[str]  # whenever it is gone through
    round: Counter[str]  # for each round of the inner loops in it


def detours(kernel: Kernel, loop: Loop, way: list[int], holds: Callable[[Instruction], bool]) -> list[Detour]:
    """The detours from `way`, the hot one, whose inner loops hold such an instruction."""
    beside, found = loop.blocks - set(way), []
    inner = [
        other
        for other in kernel.loops
        if other.blocks < beside and any(holds(i) for b in other.blocks for i in kernel.blocks[b].instructions)
    ]
    while inner:
        region = _connected(kernel, inner[0].blocks, beside)
        here = [other for other in inner if other.blocks <= region]
        inner = [other for other in inner if other not in here]
        looped = frozenset().union(*(other.blocks for other in here))
        once = max((_longest(kernel, region, start, region - looped) for start in region), key=len)
        rounds = [_longest(kernel, other.blocks, other.header, other.blocks) for other in here]
        found.append(Detour(count_pipes(once), count_pipes(max(rounds, key=len))))
    return found


def _longest(
    kernel: Kernel, region: frozenset[int], start: int, counted: frozenset[int], seen: frozenset[int] = frozenset()
) -> list[Instruction]:
    """Of the ways through a region that pass no block twice: what is `counted` on the longest one."""
    rest = [
        _longest(kernel, region, successor, counted, seen | {start})
        for successor in kernel.blocks[start].successors
        if successor in region - seen - {start}
    ]
    own = kernel.blocks[start].instructions if start in counted else []
    return own + max(rest, key=len, default=[])


def _connected(kernel: Kernel, start: frozenset[int], among: frozenset[int]) -> frozenset[int]:
    """Blocks `among` which lead to `start` or to which it leads."""
    ahead, back = set(start), set(start)
    for _ in among:
        ahead |= {s for index in ahead for s in kernel.blocks[index].successors} & among
        back |= {index for index in among if back & set(kernel.blocks[index].successors)}
    return frozenset(ahead | back)


def count_pipes(instructions: Iterable[Instruction]) -> Counter[str]:
    return Counter(pipe_of(instruction) for instruction in instructions)


def disassemble(cubin: Path) -> dict[str, Kernel]:
    """The kernels of a cubin. Raises ToolkitError without nvdisasm."""
    nvdisasm = find_program("nvdisasm")
    if nvdisasm is None:
        raise ToolkitError("nvdisasm is neither in site-packages nor on the path: pip install nvidia-cuda-nvdisasm")
    done = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True)
    if done.returncode:
        raise ToolkitError(f"{nvdisasm} -c {cubin}: {done.stderr.strip()}")
    return parse(done.stdout)
