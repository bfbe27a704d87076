"""ld, st, atom, red, cvta, prefetch."""

from __future__ import annotations

import numpy as np

from .alu_types import UnsupportedInstruction
from .checks import Kind
from .handlers import DONE, FULL, LANES, handles
from .memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, Region
from .ordering import order_of
from .program import TYPE_BYTES, Address, Instruction, Symbol, Vector

_SPACES = ("shared", "global", "local", "param", "const")
_ALL_LANES = np.arange(LANES)
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# Modifiers that only tell caches what to do.
_HINTS = {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "uni"}
_STRONG = {"relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"}
_SCOPES = {"cta", "cluster", "gpu", "sys"}


class _Access:
    """What ld, st, atom and red have in common: space, address, width, order."""

    def __init__(self, instruction: Instruction, address: Address):
        self.instruction = instruction
        modifiers = instruction.modifiers
        spaces = [m.split("::")[0] for m in modifiers if m.split("::")[0] in _SPACES]
        self.space = spaces[0] if spaces else "generic"
        if self.space == "const":
            self.space = "global"
        if isinstance(address.base, Symbol) and address.base.space == "local":
            self.space = "local"  # the parameters of a call
        self.base = address.base
        self.offset = np.uint64(address.offset & (1 << 64) - 1)
        types = [m for m in modifiers if m in TYPE_BYTES]
        if not types:
            raise UnsupportedInstruction(instruction.opcode, modifiers, "has no type")
        self.type = types[-1]
        self.width = TYPE_BYTES[self.type]
        if self.width > 8:
            raise UnsupportedInstruction(instruction.opcode, modifiers, "type is not known to the interpreter")
        self.count = 1
        self.strong = any(m in _STRONG for m in modifiers)
        self.order, self.whole_gpu = order_of(modifiers)
        known = _HINTS | _STRONG | _SCOPES | {"v2", "v4", self.type, *_SPACES}
        for m in modifiers:
            if m not in known and not m.startswith(("L1::", "L2::", "shared::", "param::")):
                self.operation = m
                break
        else:
            self.operation = None

    def address(self, warp, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(lanes, their addresses)"""
        row = warp.read(self.base, mask)
        if self.offset:
            row = row + self.offset
        if mask is FULL:
            return _ALL_LANES, row
        lanes = np.flatnonzero(mask)
        return lanes, row[lanes]

    def each_region(self, warp, lanes: np.ndarray, address: np.ndarray, write: bool):
        """Yields (rows or None for all, region, addresses as the region has them). Reports what lies nowhere."""
        if self.space == "shared":
            yield None, warp.cta.shared, address
            return
        memory = warp.machine.memory
        first = int(address[0])
        region = memory.find(first)
        if region is not None:
            offset = address - np.uint64(region.base)
            if int(np.bitwise_or.reduce(offset)) < region.size or int(offset.max()) < region.size:
                yield None, region, address
                return
        yield from self._sort(warp, lanes, address, write)

    def _sort(self, warp, lanes, address, write):
        memory = warp.machine.memory
        rows_of: dict[int, tuple[Region, list[int], int]] = {}
        lost = []
        for row, value in enumerate(address):
            value = int(value)
            window = 0
            if self.space == "generic" and SHARED_WINDOW <= value < LOCAL_WINDOW:
                region, window = warp.cta.shared, SHARED_WINDOW
            else:
                region = memory.find(value)
            if region is None:
                lost.append(row)
            else:
                rows_of.setdefault(id(region), (region, [], window))[1].append(row)
        if lost:
            self._report_lost(warp, lanes[lost], int(address[lost[0]]), write)
        for region, rows, window in rows_of.values():
            yield np.array(rows), region, address[rows] - np.uint64(window)

    def _report_lost(self, warp, lanes, address: int, write: bool) -> None:
        region = warp.machine.memory.nearest(address)
        where = region.describe(address - region.base) if region else "no tensor"
        verb = "writes" if write else "reads"
        warp.report(Kind.OUT_OF_BOUNDS, f"{verb} {self.width * self.count} bytes at {address:#x}, {where}", lanes)

    def order_strong(self, warp, lanes, address, reads: bool, writes: bool) -> None:
        """Releases and acquires. `address` as the instruction has it: shared ones don't collide with global ones."""
        ordering = warp.machine.ordering
        if not self.strong or not ordering.involves(warp, self.order):
            return
        base = warp.cta.index << 32
        for lane, value in zip(lanes.tolist(), address.tolist(), strict=True):
            if self.space == "shared":
                value += SHARED_WINDOW + base
            elif SHARED_WINDOW <= value < LOCAL_WINDOW:
                value += base
            ordering.strong(warp, lane, value, reads, writes, self.order, self.whole_gpu)


def _spread(lanes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values of some lanes -> uint64[32]"""
    if lanes is _ALL_LANES:
        return values.astype(np.uint64)
    row = np.zeros(LANES, np.uint64)
    row[lanes] = values
    return row


def _sign_extended(values: np.ndarray, type_name: str, destination_bytes: int) -> np.ndarray:
    """ld.s8 and ld.s16 fill the wider register with the sign."""
    size = TYPE_BYTES[type_name]
    if type_name[0] != "s" or size >= destination_bytes:
        return values
    wide = values.astype(np.uint64) << np.uint64(64 - 8 * size)
    signed = wide.view(np.int64) >> np.int64(64 - 8 * size)
    return signed.view(np.uint64) & np.uint64((1 << 8 * destination_bytes) - 1)


@handles("ld", "ldu")
def compile_ld(instruction: Instruction):
    destination, address = instruction.operands[:2]
    access = _Access(instruction, address)
    if access.operation:
        raise UnsupportedInstruction(instruction.opcode, instruction.modifiers, f"{access.operation} is not known")
    items = destination.items if isinstance(destination, Vector) else (destination,)
    width, count = access.width, len(items)
    access.count = count
    coherent = "nc" not in instruction.modifiers
    bytes_of = [TYPE_BYTES.get(getattr(item, "type", "b64"), 8) for item in items]

    def write_all(warp, lanes, values, mask):
        for i, item in enumerate(items):
            column = _sign_extended(values[:, i], access.type, bytes_of[i])
            warp.write(item, _spread(lanes, column), mask)

    def load(warp, mask):
        lanes, where = access.address(warp, mask)
        access.order_strong(warp, lanes, where, True, False)
        result = None
        for rows, region, addresses in access.each_region(warp, lanes, where, False):
            chosen = lanes if rows is None else lanes[rows]
            warp.machine.counters.memory(warp, region, addresses, width * count, False)
            values = region.load(warp, chosen, addresses, width, count, access.strong, coherent)
            if rows is None:
                result = values
                break
            if result is None:
                result = np.zeros((len(lanes), count), _UNSIGNED[width])
            result[rows] = values
        if result is None:
            result = np.zeros((len(lanes), count), _UNSIGNED[width])
        write_all(warp, lanes, result, mask)
        return DONE

    def load_param(warp, mask):
        lanes, where = access.address(warp, mask)
        write_all(warp, lanes, _read_param(warp, lanes, where, width, count), mask)
        return DONE

    def load_local(warp, mask):
        lanes, where = access.address(warp, mask)
        write_all(warp, lanes, _read_local(warp, lanes, where, width, count), mask)
        return DONE

    def load_generic(warp, mask):
        _, where = access.address(warp, mask)
        first = int(where[0])
        if first >= PARAM_WINDOW:
            lanes, where = access.address(warp, mask)
            values = _read_param(warp, lanes, where - np.uint64(PARAM_WINDOW), width, count)
        elif first >= LOCAL_WINDOW:
            lanes, where = access.address(warp, mask)
            values = _read_local(warp, lanes, where - np.uint64(LOCAL_WINDOW), width, count)
        else:
            return load(warp, mask)
        write_all(warp, lanes, values, mask)
        return DONE

    return {"param": load_param, "local": load_local, "generic": load_generic}.get(access.space, load)


@handles("st")
def compile_st(instruction: Instruction):
    address, source = instruction.operands[:2]
    access = _Access(instruction, address)
    if access.operation:
        raise UnsupportedInstruction(instruction.opcode, instruction.modifiers, f"{access.operation} is not known")
    items = source.items if isinstance(source, Vector) else (source,)
    width, access.count = access.width, len(items)

    def values_of(warp, lanes, mask):
        values = np.empty((len(lanes), len(items)), _UNSIGNED[width])
        for i, item in enumerate(items):
            row = warp.read(item, mask)
            values[:, i] = row if mask is FULL else row[lanes]
        return values

    def store(warp, mask):
        lanes, where = access.address(warp, mask)
        values = values_of(warp, lanes, mask)
        access.order_strong(warp, lanes, where, False, True)
        for rows, region, addresses in access.each_region(warp, lanes, where, True):
            chosen, some = (lanes, values) if rows is None else (lanes[rows], values[rows])
            warp.machine.counters.memory(warp, region, addresses, width * len(items), True)
            region.store(warp, chosen, addresses, some, width, access.strong)
        return DONE

    def store_local(warp, mask):
        lanes, where = access.address(warp, mask)
        _write_local(warp, lanes, where, values_of(warp, lanes, mask))
        return DONE

    def store_generic(warp, mask):
        lanes, where = access.address(warp, mask)
        first = int(where[0])
        if first >= PARAM_WINDOW:
            warp.report(Kind.READ_ONLY, "writes a kernel parameter", lanes)
        elif first >= LOCAL_WINDOW:
            _write_local(warp, lanes, where - np.uint64(LOCAL_WINDOW), values_of(warp, lanes, mask))
        else:
            return store(warp, mask)
        return DONE

    if access.space == "param":
        raise UnsupportedInstruction(instruction.opcode, instruction.modifiers, "kernels can't write parameters")
    return {"local": store_local, "generic": store_generic}.get(access.space, store)


def _read_param(warp, lanes, offset, width: int, count: int) -> np.ndarray:
    data = warp.machine.parameters
    size = width * count
    if int(offset.max()) + size > len(data):
        warp.report(Kind.OUT_OF_BOUNDS, f"reads {size} bytes at byte {int(offset.max())} of {len(data)} of parameters")
        return np.zeros((len(lanes), count), _UNSIGNED[width])
    index = offset.astype(np.int64)[:, None] + np.arange(size)
    return np.ascontiguousarray(data[index]).view(_UNSIGNED[width])


def _local_index(warp, lanes, offset, size: int):
    bytes_there = 0 if warp.local is None else warp.local.shape[2]
    good = offset <= max(bytes_there - size, -1) if bytes_there >= size else np.zeros(len(lanes), bool)
    if not good.all():
        detail = f"{size} bytes at byte {int(offset[~good][0])} of {bytes_there} of local memory"
        warp.report(Kind.OUT_OF_BOUNDS, detail, lanes[~good])
    rows = np.flatnonzero(good)
    return rows, lanes[rows][:, None], offset[rows].astype(np.int64)[:, None] + np.arange(size)


def _read_local(warp, lanes, offset, width: int, count: int) -> np.ndarray:
    result = np.zeros((len(lanes), count), _UNSIGNED[width])
    rows, lane, column = _local_index(warp, lanes, offset, width * count)
    if len(rows):
        data, initialised = warp.local
        missing = ~initialised[lane, column].all(axis=1)
        if missing.any():
            warp.report(Kind.UNINITIALISED_MEMORY, "reads local bytes never written", lanes[rows[missing]])
        result[rows] = np.ascontiguousarray(data[lane, column]).view(_UNSIGNED[width])
    return result


def _write_local(warp, lanes, offset, values: np.ndarray) -> None:
    size = values.itemsize * values.shape[1]
    rows, lane, column = _local_index(warp, lanes, offset, size)
    if len(rows):
        data, initialised = warp.local
        data[lane, column] = np.ascontiguousarray(values[rows]).view(np.uint8)
        initialised[lane, column] = 1


def _typed(values: np.ndarray, type_name: str) -> np.ndarray:
    kind = {"s": "i", "f": "f"}.get(type_name[0], "u")
    return values.view(f"{kind}{values.itemsize}")


_ATOMIC = {
    "add": np.add,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
}


@handles("atom", "red")
def compile_atomic(instruction: Instruction):
    returns = instruction.opcode == "atom"
    operands = instruction.operands
    destination = operands[0] if returns else None
    address, *sources = operands[1:] if returns else operands
    access = _Access(instruction, address)
    access.strong = True
    name, type_name, width = access.operation, access.type, access.width
    numbers = type_name[0] in "us" or type_name in ("b32", "b64", "f32", "f64")
    if not numbers or name not in (*_ATOMIC, "exch", "cas", "inc", "dec") or width < 4:
        raise UnsupportedInstruction(instruction.opcode, instruction.modifiers)
    combine = _ATOMIC.get(name)

    def one_by_one(cells, index, values, order):
        """Lanes in some order: what each found there."""
        found = np.empty(len(index), cells.dtype)
        for row in order:
            at = index[row]
            old = found[row] = cells[at]
            new = values[0][row]
            if name == "cas":
                new = values[1][row] if old == new else old
            elif name == "inc":
                new = 0 if old >= new else old + 1
            elif name == "dec":
                new = new if old == 0 or old > new else old - 1
            elif combine is not None:
                new = combine(old, new)
            cells[at] = new
        return found

    def step(warp, mask):
        lanes, where = access.address(warp, mask)
        rows_of_sources = [warp.read(source, mask) for source in sources]
        old = np.zeros(len(lanes), np.uint64)
        access.order_strong(warp, lanes, where, True, True)
        for rows, region, addresses in access.each_region(warp, lanes, where, True):
            chosen = lanes if rows is None else lanes[rows]
            warp.machine.counters.memory(warp, region, addresses, width, True)
            good, index = region.atomic_index(warp, chosen, addresses, width)
            if len(good) == 0:
                continue
            cells = _typed(region.words(width, 1)[:, 0], type_name)
            values = [_typed(row[chosen[good]].astype(_UNSIGNED[width]), type_name) for row in rows_of_sources]
            if not returns and combine is not None:
                combine.at(cells, index, values[0])
                continue
            order = list(range(len(good)))
            warp.machine.random.shuffle(order)
            found = one_by_one(cells, index, values, order).view(_UNSIGNED[width])
            old[good if rows is None else rows[good]] = found
        if destination is not None:
            warp.write(destination, _spread(lanes, old), mask)
        return DONE

    return step


@handles("cvta")
def compile_cvta(instruction: Instruction):
    destination, source = instruction.operands
    modifiers = [m.split("::")[0] for m in instruction.modifiers]
    window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}.get(
        next(m for m in modifiers if m in _SPACES), 0
    )
    window = np.uint64(window)
    back = "to" in modifiers

    def step(warp, mask):
        value = warp.read(source, mask)
        warp.write(destination, value - window if back else value + window, mask)
        return DONE

    return step


@handles("prefetch", "prefetchu", "discard", "applypriority")
def compile_prefetch(instruction: Instruction):
    (address, *_) = instruction.operands

    def step(warp, mask):
        warp.read(address.base, mask)
        return DONE

    return step
