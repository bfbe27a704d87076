"""What the parser makes of a PTX module: kernels, instructions, operands. Data only.

Every value an instruction names has a *slot*: a row of 32 lanes in its warp. Registers, immediates, symbol addresses
and special registers are all slots, so executing needs no look-up by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Bytes of a value of each PTX type.
TYPE_BYTES = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4,
    "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "pred": 1, "b128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Location:
    """Where an instruction comes from: innermost frame first, then the lines it was inlined at."""

    frames: tuple[tuple[str, int], ...]

    @property
    def file(self) -> str:
        return self.frames[0][0]

    @property
    def line(self) -> int:
        return self.frames[0][1]

    def __str__(self) -> str:
        return " < ".join(f"{file}:{line}" for file, line in self.frames)


NOWHERE = Location((("?", 0),))


@dataclass(frozen=True)
class Register:
    slot: int
    name: str
    type: str  # the declared one: "b32", "pred", …
    negated: bool = False  # `!p`


@dataclass(frozen=True)
class Immediate:
    slot: int
    value: int  # as written, signed; the slot's row holds it cut to the instruction's type


@dataclass(frozen=True)
class Symbol:
    """The address of a variable: shared, local, param, global or const."""

    slot: int
    name: str
    space: str


@dataclass(frozen=True)
class Special:
    slot: int
    name: str  # "tid.x"


@dataclass(frozen=True)
class Sink:
    """`_`"""


@dataclass(frozen=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """`d|p`"""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Address:
    """`[base+offset]`, with tensor coordinates or the like behind it."""

    base: Operand
    offset: int
    rest: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Name:
    """A function's name, or what else is no value."""

    text: str


Operand = Register | Immediate | Symbol | Special | Sink | Vector | Pair | Address | Name


@dataclass(eq=False)
class Instruction:
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: Register | None
    location: Location
    text: str
    index: int
    targets: tuple[int, ...] = ()  # of a branch: indices of instructions

    @property
    def name(self) -> str:
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True)
class Variable:
    """A variable of a memory space. `offset` counts from the start of the kernel's part of it."""

    name: str
    space: str
    offset: int
    bytes: int
    align: int
    initial: bytes | None = None  # of global and const variables


@dataclass
class Slot:
    kind: str  # "register", "immediate", "symbol", "special"
    name: str
    type: str = ""
    value: int = 0


@dataclass(eq=False)
class Kernel:
    name: str
    module: Module
    parameters: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)  # shared, local and param ones, by scoped name
    shared_bytes: int = 0  # static ones, laid out from 0
    local_bytes: int = 0
    dynamic_align: int = 16  # of the extern shared array
    max_threads: int | None = None
    compiled: list | None = None  # execute.Entry, by instruction

    @property
    def parameter_bytes(self) -> int:
        return max((p.offset + p.bytes for p in self.parameters), default=0)


@dataclass(eq=False)
class Module:
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)  # global and const
    dynamic_shared: dict[str, int] = field(default_factory=dict)  # extern shared arrays and their alignment
    functions: set[str] = field(default_factory=set)  # names of device functions that have a body
