"""PTX text -> program.Module. Names, labels and scopes are resolved here, once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from . import program
from .lexer import Locations, ParseError, Statements, decimal, number, split, top_level
from .program import (
    TYPE_BYTES,
    Address,
    Immediate,
    Instruction,
    Kernel,
    Module,
    Name,
    Operand,
    Pair,
    Register,
    Sink,
    Slot,
    Special,
    Symbol,
    Variable,
    Vector,
)

_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$"
    r"|%(laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock64|clock_hi|globaltimer|dynamic_smem_size|total_smem_size"
    r"|lanemask_(?:eq|le|lt|ge|gt))$"
)
_VARIABLE = re.compile(
    r"(?:\.(?:visible|weak|extern|common)\s+)*\.(?P<space>shared|local|param|global|const)\s*"
    r"(?:\.align\s+(?P<align>\d+)\s*)?\.(?P<type>\w+)\s+(?P<name>[\w$%]+)\s*(?P<dims>(?:\[\d*\])*)"
    r"\s*(?:=\s*(?P<value>.*))?$",
    re.S,
)


class _KernelsWhenAsked(Mapping[str, Kernel]):
    """Parsed one by one: kernels have thousands of instructions, and few tests need all of a file."""

    def __init__(self, parsers: dict[str, Callable[[], Kernel]]):
        self._parsers, self._parsed = parsers, {}

    def __getitem__(self, name: str) -> Kernel:
        if name not in self._parsed:
            self._parsed[name] = self._parsers[name]()
        return self._parsed[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parsers

    def __iter__(self) -> Iterator[str]:
        return iter(self._parsers)

    def __len__(self) -> int:
        return len(self._parsers)


def parse_ptx(text: str, when_asked: bool = False) -> Module:
    """All kernels of a module as nvcc emits it, each when it is asked for if so wanted. Raises ParseError."""
    files = {int(number): name for number, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', text, re.M)}
    text = re.sub(r'^\s*\.file\s+\d+\s+"[^"]+".*$', "", text, flags=re.M)
    text = re.sub(r"^\s*\.section\b.*?\{.*?\}", "", text, flags=re.M | re.S)
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"^\s*\.(version|target|address_size)\b[^\n]*", "", text, flags=re.M)
    module = Module()
    bodies = []
    for head, body in top_level(text):
        if body is None:
            _declare(module, head)
        elif match := re.search(r"\.entry\s+([\w$]+)", head):
            bodies.append((match.group(1), head, body))
        elif match := re.search(r"\.func\s*(?:\([^)]*\)\s*)?([\w$]+)", head):
            module.functions.add(match.group(1))
        else:
            raise ParseError(f"unknown top-level PTX: {head[:80]!r}")
    module.kernels = _KernelsWhenAsked(
        {name: partial(_parse_kernel, module, name, head, files, body) for name, head, body in bodies}
    )
    if not when_asked:
        module.kernels = dict(module.kernels)
    return module


def _parse_kernel(module: Module, name: str, head: str, files: dict[int, str], body: str) -> Kernel:
    return _KernelParser(module, name, head, files).parse(body)


def _declare(module: Module, head: str) -> None:
    if ".func" in head.split("(")[0] or head.startswith((".extern .func", ".pragma", ".alias")):
        return
    match = _VARIABLE.match(head)
    if not match:
        raise ParseError(f"unknown declaration: {head[:100]!r}")
    if match["space"] == "shared" and match["dims"] == "[]":
        module.dynamic_shared[match["name"]] = int(match["align"] or 1)
        return
    variable = _variable(match, 0)
    module.variables[variable.name] = variable


def _variable(match: re.Match, offset: int) -> Variable:
    size = element = TYPE_BYTES[match["type"]]
    for count in re.findall(r"\[(\d+)\]", match["dims"]):
        size *= int(count)
    align = int(match["align"] or element)
    initial = None
    if match["space"] in ("global", "const"):
        initial = _initial_bytes(match["name"], match["value"], element, size)
    return Variable(match["name"], match["space"], -(-offset // align) * align, size, align, initial)


def _initial_bytes(name: str, value: str | None, element: int, size: int) -> bytes:
    if value is None:
        return bytes(size)
    items = [item.strip() for item in value.strip().strip("{}").split(",") if item.strip()]
    try:
        numbers = [int(item, 0) if number(item) is None else number(item) for item in items]
    except ValueError:
        raise ParseError(f"initial value of {name}: only numbers are supported, not {value[:60]!r}") from None
    data = b"".join((number & (256**element - 1)).to_bytes(element, "little") for number in numbers)
    return data.ljust(size, b"\0")


class _Scope:
    """Names between two braces. Inline assembly opens scopes that use the same names again."""

    def __init__(self, outer: _Scope | None, prefix: str):
        self.outer = outer
        self.prefix = prefix
        self.registers: dict[str, Register] = {}
        self.variables: dict[str, Variable] = {}
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}  # of .branchtargets

    def find(self, kind: str, name: str):
        scope: _Scope | None = self
        while scope:
            found = getattr(scope, kind).get(name)
            if found is not None:
                return found
            scope = scope.outer
        return None


class _KernelParser:
    def __init__(self, module: Module, name: str, head: str, files: dict[int, str]):
        self._kernel = Kernel(name, module)
        self._locations = Locations(files)
        self._scope = _Scope(None, "")
        self._scopes = 0
        self._immediates: dict[int, int] = {}
        self._named: dict[tuple[str, str], int] = {}
        self._branches: list[tuple[Instruction, _Scope, list[str]]] = []
        self._label_pending: str | None = None
        self._parameters(head)
        self._kernel.dynamic_align = max([16, *module.dynamic_shared.values()])
        if match := re.search(r"\.(?:maxntid|reqntid)\s+([\d,\s]+)", head):
            self._kernel.max_threads = 1
            for size in re.findall(r"\d+", match.group(1)):
                self._kernel.max_threads *= int(size)

    def _parameters(self, head: str) -> None:
        match = re.search(r"\.entry\s+[\w$]+\s*\((.*?)\)", head, re.S)
        offset = 0
        for text in split(match.group(1)) if match else []:
            declared = _VARIABLE.match(re.sub(r"\.ptr(\s*\.(?!align)\w+)?(\s*\.align\s+\d+)?", "", text))
            if not declared:
                raise ParseError(f"{self._kernel.name}: unknown parameter {text!r}")
            variable = _variable(declared, offset)
            offset = variable.offset + variable.bytes
            self._kernel.parameters.append(variable)
            self._scope.variables[variable.name] = variable

    def parse(self, body: str) -> Kernel:
        for kind, text in Statements(body):
            if kind == "loc":
                self._locations.see(text)
            elif kind == "brace":
                self._brace(text)
            elif kind == "label":
                self._scope.labels[text] = len(self._kernel.instructions)
                self._label_pending = text
            elif text.startswith("."):
                self._directive(text)
            else:
                self._instruction(text)
        for instruction, scope, labels in self._branches:
            instruction.targets = tuple(self._target(scope, label, instruction) for label in labels)
        end = len(self._kernel.instructions)
        # Running off the end is a return.
        self._kernel.instructions.append(Instruction("ret", (), (), None, self._locations.current, "ret", end))
        return self._kernel

    def _target(self, scope: _Scope, label: str, instruction: Instruction) -> int:
        target = scope.find("labels", label)
        if target is None:
            raise ParseError(f"{self._kernel.name}: no label {label} for {instruction.text!r}")
        return target

    def _brace(self, text: str) -> None:
        if text == "{":
            self._scopes += 1
            self._scope = _Scope(self._scope, f"{self._scopes}.")
        else:
            self._scope = self._scope.outer

    def _directive(self, text: str) -> None:
        if match := re.match(r"\.reg\s*\.(\w+)\s+(.*)", text):
            for name in split(match.group(2)):
                many = re.fullmatch(r"(\S+?)<(\d+)>", name)
                names = [f"{many.group(1)}{i}" for i in range(int(many.group(2)))] if many else [name]
                for each in names:
                    slot = self._slot(Slot("register", self._scope.prefix + each, match.group(1)))
                    self._scope.registers[each] = Register(slot, self._scope.prefix + each, match.group(1))
        elif text.startswith((".shared", ".local", ".param")):
            self._local_variable(text)
        elif text.startswith(".branchtargets"):
            self._scope.tables[self._label_pending] = split(text.split(None, 1)[1])
        elif not text.startswith((".pragma", ".callprototype")):
            raise ParseError(f"{self._kernel.name}: unknown directive {text!r}")

    def _local_variable(self, text: str) -> None:
        match = _VARIABLE.match(text)
        if not match:
            raise ParseError(f"{self._kernel.name}: unknown declaration {text!r}")
        kernel = self._kernel
        if match["space"] == "shared":
            variable = _variable(match, kernel.shared_bytes)
            kernel.shared_bytes = variable.offset + variable.bytes
        else:  # parameters of a call are the caller's own memory
            variable = _variable(match, kernel.local_bytes)
            kernel.local_bytes = variable.offset + variable.bytes
            variable = program.Variable(variable.name, "local", variable.offset, variable.bytes, variable.align)
        self._scope.variables[variable.name] = variable
        kernel.variables[self._scope.prefix + variable.name] = variable

    def _instruction(self, text: str) -> None:
        predicate, rest = None, text
        if match := re.match(r"@(!?)([\w$%]+)\s+(.*)", text, re.S):
            found = self._scope.find("registers", match.group(2))
            if found is None:
                raise ParseError(f"{self._kernel.name}: no predicate {match.group(2)} in {text!r}")
            predicate = Register(found.slot, found.name, found.type, match.group(1) == "!")
            rest = match.group(3)
        match = re.match(r"([\w.:]+)\s*(.*)", rest, re.S)
        opcode, *modifiers = match.group(1).replace("::", ":").split(".")
        modifiers = tuple(modifier.replace(":", "::") for modifier in modifiers)
        parts = split(match.group(2))
        index = len(self._kernel.instructions)
        location = self._locations.current
        if opcode == "bra":
            instruction = Instruction(opcode, modifiers, (), predicate, location, text, index)
            self._branches.append((instruction, self._scope, parts))
        elif opcode == "brx":
            operands = (self._operand(parts[0], modifiers, 0),)
            instruction = Instruction(opcode, modifiers, operands, predicate, location, text, index)
            labels = self._scope.find("tables", parts[1])
            if labels is None:
                raise ParseError(f"{self._kernel.name}: no branch targets {parts[1]}")
            self._branches.append((instruction, self._scope, labels))
        elif opcode == "call":
            operands = tuple(self._call_operand(part) for part in parts)
            instruction = Instruction(opcode, modifiers, operands, predicate, location, text, index)
        else:
            operands = tuple(self._operand(part, modifiers, i) for i, part in enumerate(parts))
            instruction = Instruction(opcode, modifiers, operands, predicate, location, text, index)
        self._kernel.instructions.append(instruction)

    def _call_operand(self, text: str) -> Operand:
        if text.startswith("("):
            return Vector(tuple(self._operand(part, ("b64",), 1) for part in split(text[1:-1])))
        return Name(text)

    def _operand(self, text: str, modifiers: tuple[str, ...], position: int) -> Operand:
        if text == "_":
            return Sink()
        if text[0] in "{(":
            return Vector(tuple(self._operand(part, modifiers, position) for part in split(text[1:-1])))
        if text[0] == "[":
            return self._address(text)
        if "|" in text:
            first, second = (part.strip() for part in text.split("|"))
            return Pair(self._operand(first, modifiers, position), self._operand(second, modifiers, position))
        negated = text.startswith("!")
        register = self._scope.find("registers", text[1:].strip() if negated else text)
        if register is not None:
            return Register(register.slot, register.name, register.type, negated) if negated else register
        value = number(text)
        if value is None:
            value = decimal(text, modifiers)
        if value is not None:
            return Immediate(self._immediate(value & _immediate_mask(modifiers, position)), value)
        if _SPECIAL.match(text):
            return Special(self._unique("special", text[1:]), text[1:])
        symbol = self._symbol(text)
        if symbol is None:
            raise ParseError(f"{self._kernel.name}: unknown operand {text!r}")
        return symbol

    def _symbol(self, text: str) -> Symbol | Immediate | None:
        match = re.fullmatch(r"([\w$%]+)(?:\s*\+\s*(-?\d+))?", text)
        if not match:
            return None
        name, module = match.group(1), self._kernel.module
        variable = self._scope.find("variables", name) or module.variables.get(name)
        if variable is None and name not in module.dynamic_shared:
            return None
        space = variable.space if variable else "dynamic"
        slot = self._unique("symbol", name, space, variable.offset if variable else 0)
        return Symbol(slot, name, space)

    def _address(self, text: str) -> Address:
        inside, *rest = split(text[1:-1])
        match = re.fullmatch(r"([^\s+]+)\s*(?:\+\s*(-?\w+))?", inside)
        if not match:
            raise ParseError(f"{self._kernel.name}: unknown address {text!r}")
        base = self._operand(match.group(1), (), 1)
        offset = int(match.group(2) or "0", 0)
        return Address(base, offset, tuple(self._operand(part, (), 1) for part in rest))

    def _slot(self, slot: Slot) -> int:
        self._kernel.slots.append(slot)
        return len(self._kernel.slots) - 1

    def _immediate(self, value: int) -> int:
        if value not in self._immediates:
            self._immediates[value] = self._slot(Slot("immediate", str(value), "b64", value))
        return self._immediates[value]

    def _unique(self, kind: str, name: str, space: str = "", offset: int = 0) -> int:
        key = (kind, name, space, offset)
        if key not in self._named:
            self._named[key] = self._slot(Slot(kind, name, space, offset))
        return self._named[key]


def _immediate_mask(modifiers: tuple[str, ...], position: int) -> int:
    """Rows of 32-bit values have zeros above: an immediate is cut to the width of the operand it is."""
    types = [modifier for modifier in modifiers if modifier in TYPE_BYTES and modifier != "pred"]
    bits = 8 * TYPE_BYTES[types[-1]] if types else 64
    if "wide" in modifiers and position == 3:
        bits *= 2
    return (1 << max(bits, 8)) - 1
