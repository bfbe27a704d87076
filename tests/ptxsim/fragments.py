"""Where the lanes of a warp or a warpgroup hold the elements of a matrix, for wgmma, mma.sync, ldmatrix and stmatrix.

Maps are pairs (row, column) of integer arrays. A 16-bit register holds two neighbours, the lower half first.
"""

import numpy as np

_LANE = np.arange(32)
_GROUP, _IN_GROUP = _LANE // 4, _LANE % 4

Positions = tuple[np.ndarray, np.ndarray]


def accumulator(columns: int) -> Positions:
    """FP32 accumulators of one warp's 16 rows → int[columns / 2 registers, 32 lanes].

    wgmma: warp w of the warpgroup adds 16 w to the row. mma.m16n8k16: columns = 8.
    """
    register = np.arange(columns // 2)[:, None]
    row = _GROUP + 8 * (register >> 1 & 1)
    return row, 8 * (register >> 2) + 2 * _IN_GROUP + (register & 1)


def operand_a() -> Positions:
    """16-bit A of one warp's 16 rows × 16 k → int[4 registers, 2 halves, 32 lanes]."""
    register, half = np.arange(4)[:, None, None], np.arange(2)[None, :, None]
    row = _GROUP + 8 * (register & 1) + 0 * half
    return row, 8 * (register >> 1) + 2 * _IN_GROUP + half


def operand_b() -> Positions:
    """16-bit B of mma.m16n8k16 → (k, n) as int[2 registers, 2 halves, 32 lanes]."""
    register, half = np.arange(2)[:, None, None], np.arange(2)[None, :, None]
    return 8 * register + 2 * _IN_GROUP + half, _GROUP + 0 * (register + half)


def halves(registers: np.ndarray) -> np.ndarray:
    """uint64[R, 32] → uint16[R, 2 halves, 32]."""
    words = registers.astype(np.uint32)
    return np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=1).astype(np.uint16)


def to_registers(pairs: np.ndarray) -> np.ndarray:
    """uint16[R, 2 halves, 32] → uint64[R, 32]."""
    wide = pairs.astype(np.uint64)
    return wide[:, 0] | wide[:, 1] << np.uint64(16)


def _of_matrix(transposed: bool) -> Positions:
    """8 × 8 16-bit elements in one register of a warp → int[2 halves, 32 lanes]."""
    row, column = _GROUP + np.zeros((2, 1), int), 2 * _IN_GROUP + np.arange(2)[:, None]
    return (column, row) if transposed else (row, column)


def matrices_to_registers(matrices: np.ndarray, transposed: bool) -> np.ndarray:
    """ldmatrix: uint16[matrices, 8, 8] → uint64[matrices, 32]."""
    row, column = _of_matrix(transposed)
    return to_registers(matrices[:, row, column])


def registers_to_matrices(registers: np.ndarray, transposed: bool) -> np.ndarray:
    """stmatrix: uint64[matrices, 32] → uint16[matrices, 8, 8]."""
    row, column = _of_matrix(transposed)
    matrices = np.empty((len(registers), 8, 8), np.uint16)
    matrices[:, row, column] = halves(registers)
    return matrices
