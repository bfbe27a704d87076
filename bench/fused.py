"""What a weight costs the fused product: instructions with the patches of real weights, and shared memory's wavefronts.

    python bench/fused.py [CHECKPOINT]      a folder of BF16 safetensors (default: all-mpnet-base-v2)

Instructions are counted in what ptxas makes of the kernels, patches in the packed weights, wavefronts by the tests'
PTX interpreter on weights of the checkpoint. Nothing is measured, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

import check_cubin  # noqa: E402
import native_build  # noqa: E402
import numpy as np  # noqa: E402
import sass  # noqa: E402
import torch  # noqa: E402
from cuda_reading import layout_number  # noqa: E402
from linear_product import Product, Weight, config, tokens  # noqa: E402
from native_module import native  # noqa: E402
from ptxsim.counters import Counters  # noqa: E402
from ptxsim.device import SimulatedDevice  # noqa: E402

from unweight_ext.packed import pack_quietly  # noqa: E402
from unweight_ext.tuning.costs import Patches  # noqa: E402

LAYOUTS = ("huffman", "nibble")
ANCHOR, EXPONENTS = "HGMMA", "0x7f807f80"  # what multiplies; the mask with which a patch is put into a register
LANE_WEIGHTS = 64  # of a lane, in a stage
GROUP = 64  # weights: what wavefronts are given for


# ------------------------------------------------------------------------------------------- patches of packed weights


def patches_of(packed: Iterable[np.ndarray]) -> Patches:
    """The averages over all warps' stages of packed matrices (uint8), from their headers."""
    heads = np.concatenate([_warp_headers(matrix.reshape(-1)) for matrix in packed])
    bits = np.array([bin(mask).count("1") for mask in range(256)])
    count, mask = heads >> 24, heads >> 16 & 255
    crowded = count > Patches.MOST
    usual = np.where(crowded, 0, 1)
    return Patches(
        ksteps=float((bits[mask] * usual).mean()),
        batches=float((((mask & 15 != 0) * 1 + (mask >> 4 != 0)) * usual).mean()),
        patches=float((count * usual).mean()),
        crowded=float(crowded.mean()),
        crowded_patches=float((count * crowded).mean()),
    )


def _warp_headers(data: np.ndarray) -> np.ndarray:
    """docs/FORMAT.md section 5: int64 [4 · stages]."""
    rows, columns = (int(n) for n in data[24:40].view("<u8"))
    index, data_at = (int(data[at : at + 8].view("<u8")[0]) for at in (48, 64))
    stages = -(-rows // 64) * -(-columns // 128)
    starts = data_at + 16 * data[index : index + 4 * stages].view("<u4").astype(np.int64)
    return data[starts[:, None] + np.arange(16)].view("<u4").astype(np.int64).ravel()


def matrices(checkpoint: Path) -> Iterator[torch.Tensor]:
    """The weights of linear layers."""
    from safetensors import safe_open

    for file in sorted(checkpoint.rglob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                tensor = tensors.get_tensor(name)
                if tensor.ndim == 2 and tensor.dtype == torch.bfloat16 and "embed" not in name and len(tensor) >= 64:
                    yield tensor


# ------------------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True)
class Loop:
    """What a kernel's consumers issue for a stage, by pipe."""

    hot: Counter[str]  # without patches
    detour: Counter[str]  # at most: of a k-step (huffman) or batch (nibble) with patches
    patch: Counter[str]
    crowded: Counter[str]  # at most: more of a stage with too many patches for a warp's registers, and
    crowded_patch: Counter[str]

    def per_weight(self, layout: str, rates: Patches) -> dict[str, float]:
        """By pipe; `rates` are those of the layout."""
        detours = rates.ksteps if layout == "huffman" else rates.batches
        parts = ((self.detour, detours), (self.patch, rates.patches), (self.crowded, rates.crowded))
        total = Counter(self.hot)
        for counts, times in (*parts, (self.crowded_patch, rates.crowded_patches)):
            total.update({pipe: count * times for pipe, count in counts.items()})
        return {pipe: count / LANE_WEIGHTS for pipe, count in total.items()}


def loop_of(layout: str, kernel: sass.Kernel) -> Loop:
    loop = sass.hot_loop(kernel, ANCHOR)
    way = sass.hot_way(kernel, loop, ANCHOR)
    found = sass.detours(kernel, loop, way, lambda instruction: EXPONENTS in instruction.operands)
    # Where codes are decoded as well, a stage is crowded.
    usual = [detour for detour in found if layout == "nibble" or not detour.once["FMA-heavy"]]
    crowded = [detour for detour in found if detour not in usual]
    once, patch = (max(counts, key=Counter.total) for counts in zip(*((d.once, d.round) for d in usual), strict=True))
    return Loop(
        sass.count_pipes(sass.hot_path(kernel, loop, ANCHOR)),
        once,
        patch,
        sum((detour.once for detour in crowded or found), Counter()),
        max((detour.round for detour in crowded or found), key=Counter.total),
    )


def compiled_loop(layout: str, size: int = 16) -> Loop:
    """Of the kernel for `size` tokens at once, which is compiled alone."""
    folder, name = ROOT / "csrc" / "cuda" / "linear", f"unweight_linear_{layout}_{size}"
    lines = (folder / f"linear_{layout}.cu").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("//", "UNWEIGHT_LINEAR_KERNEL")) or f"({name}," in line]
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "kernel.cu"
        source.write_text("\n".join(kept).replace('#include "', f'#include "{folder}/'))
        return loop_of(layout, check_cubin.compile_file(native_build.find_nvcc().path, source).kernels[name])


# --------------------------------------------------------------------------------------------------------- wavefronts


class SharedUse(Counters):
    """Wavefronts of shared memory by who uses it, those of look-ups in the code table apart."""

    consumers = 0  # warps

    def clear(self) -> None:
        super().clear()
        self.use: Counter[str] = Counter()
        self.conflicts: Counter[str] = Counter()
        self._table = (1 << 62, 0)

    def memory(self, warp, region, address: np.ndarray, size: int, write: bool) -> None:
        super().memory(warp, region, address, size, write)
        if region is not warp.cta.shared:
            return
        files = {Path(file).name for file, _ in warp.current.location.frames}
        place = "copying warps' words" if warp.index >= self.consumers else "consumers' writes"
        if "code_table.cuh" in files:
            place = "filling the table"
            self._table = min(self._table[0], int(address.min())), max(self._table[1], int(address.max()))
        elif not write and place == "consumers' writes":
            looks_up = self._table[0] <= int(address.min()) <= self._table[1]
            place = "consumers' look-ups" if looks_up else "consumers' other loads"
        before = self.wavefronts_of_last
        self.use[place] += before[0]
        self.conflicts[place] += before[0] - before[1]

    def _counts_of(self, key, count, address, size):
        self.wavefronts_of_last = super()._counts_of(key, count, address, size)
        return self.wavefronts_of_last


class CountedProduct(Product):
    def run(self) -> list[np.ndarray]:
        self.device = SimulatedDevice(self.multiprocessors, self.seed)
        self.counters = self.device.machine.counters = SharedUse()
        self.counters.consumers = 4 * self.config.warpgroups
        self.call = self._call()
        native.linear(self.device, self.call, self.config)
        return self.read()


def wavefronts(weight: torch.Tensor, layout: str, size: int) -> tuple[Counter[str], int]:
    """For 64 weights, by what causes them, in all stages but the first two; and conflicts at the table.

    weight: BF16, 64 or 192 rows, 256 columns at least; some 768 take a minute.
    """
    few, all_of_it = (_shared_use(weight[:, :k], layout, size) for k in (256, weight.shape[1]))
    groups = len(weight) * (weight.shape[1] - 256) / GROUP
    return Counter({p: (all_of_it[0][p] - few[0][p]) / groups for p in all_of_it[0]}), all_of_it[1]


def _shared_use(weight: torch.Tensor, layout: str, size: int) -> tuple[Counter[str], int]:
    columns = weight.shape[1]
    data = pack_quietly(weight.contiguous(), layout).numpy()
    product = CountedProduct(
        [Weight(data, columns, layout=layout_number(layout))], tokens(size, columns), config(size), multiprocessors=1
    )
    product.check()
    counted = product.counters
    use = Counter(counted.use)
    # A wavefront is 128 bytes. Of x each wgmma reads 16 columns of all its tokens, for four warps together.
    use["bulk copies of weights"] = counted.bulk_loaded / 128
    use["copies of x"] = sum(n for name, n in counted.opcodes.items() if name.startswith("cp.async.cg")) * 32 * 16 / 128
    multiplied = sum(n for name, n in counted.opcodes.items() if name.startswith("wgmma.mma_async")) / 4
    use["wgmma's reads of x"] = multiplied * size * 32 / 128
    return use, counted.conflicts["consumers' look-ups"]


# The design's figure: what the loop of the consumers needs. The others are on top.
OF_THE_BAR = ("consumers' look-ups", "consumers' other loads", "bulk copies of weights", "wgmma's reads of x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, help="default: all-mpnet-base-v2")
    source = parser.parse_args().checkpoint
    if source is None:
        from bench import weights

        source = weights.mpnet()
    heads = ("k-steps with patches, of 8", "patches", "crowded stages", "without patches", "with them", "ALU")
    print("Patches of a warp's stage, and instructions a weight for 16 tokens:\n")
    print(f"| | {' | '.join(heads)} |\n{'|---' * 7}|")
    loops = {layout: compiled_loop(layout) for layout in LAYOUTS}
    for layout, loop in loops.items():
        rates = patches_of(pack_quietly(tensor, layout).numpy() for tensor in matrices(source))
        all_pipes = loop.per_weight(layout, rates)
        cells = (f"{rates.ksteps:.3f}", f"{rates.patches:.3f}", f"{100 * rates.crowded:.3f} %")
        counts = (loop.hot.total() / LANE_WEIGHTS, sum(all_pipes.values()), all_pipes["ALU"])
        print(f"| `{layout}` | {' | '.join(cells)} | {' | '.join(f'{count:.2f}' for count in counts)} |")
    heads = ("k-step or four of them with patches, at most", "patch", "ALU a weight without patches")
    print(f"\nInstructions:\n\n| | {' | '.join(heads)} |\n{'|---' * 4}|")
    for layout, loop in loops.items():
        counts = (loop.detour.total(), loop.patch.total(), f"{loop.hot['ALU'] / LANE_WEIGHTS:.2f}")
        print(f"| `{layout}` | {' | '.join(map(str, counts))} |")
    sample = next(tensor for tensor in matrices(source) if len(tensor) >= 192 and tensor.shape[1] >= 768)[:192, :768]
    heads = (*OF_THE_BAR, "together", "beside it", "conflicts")
    print(f"\nWavefronts of shared memory for 64 weights:\n\n| | {' | '.join(heads)} |\n{'|---' * 8}|")
    for layout in LAYOUTS:
        for size in (16, 64):
            use, conflicts = wavefronts(sample, layout, size)
            bar = [use[place] for place in OF_THE_BAR]
            others = sum(use.values()) - sum(bar)
            cells = " | ".join(f"{count:.2f}" for count in (*bar, sum(bar), others))
            print(f"| `{layout}`, {size} tokens | {cells} | {conflicts} |")


if __name__ == "__main__":
    main()
