"""What ptxas makes of the kernels: nothing spilled, nothing in local memory, within the budgets beside the kernels."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import check_cubin
import native_build
import sass
from cuda_toolkit import AMPERE, HOPPER, INSTALL_HINT, LATER, NVCC_NOT_FOUND, architectures, gencode, ptx_flags

ROOT = native_build.ROOT
SOURCES = native_build.cuda_sources()


@pytest.fixture(scope="module")
def nvcc() -> Path:
    found = native_build.find_nvcc()
    assert found is not None, f"{NVCC_NOT_FOUND}: {INSTALL_HINT}"
    return found.path


@pytest.fixture(scope="module", params=SOURCES, ids=lambda source: source.stem)
def compiled(request: pytest.FixtureRequest, nvcc: Path) -> check_cubin.Compiled:
    return check_cubin.compile_file(nvcc, request.param)


def test_kernels_are_as_fast_as_their_source_says(compiled: check_cubin.Compiled) -> None:
    assert compiled.problems() == []


EVERYWHERE = [source for source in SOURCES if AMPERE in architectures(source)]


@pytest.mark.parametrize("source", EVERYWHERE, ids=lambda source: source.stem)
def test_kernels_fit_gpus_before_hopper(source: Path, nvcc: Path) -> None:
    compiled = check_cubin.compile_file(nvcc, source, AMPERE)
    assert compiled.problems() == []
    assert sorted(compiled.kernels) == sorted(native_build.kernel_names(source))


@pytest.mark.slow
@pytest.mark.parametrize("source", EVERYWHERE, ids=lambda source: source.stem)
def test_code_for_every_gpu_from_8_0_on(source: Path, nvcc: Path, tmp_path: Path) -> None:
    """What the driver does with the PTX on GPUs that came after Hopper, ptxas does here."""
    ptx = tmp_path / "kernels.ptx"
    subprocess.run([nvcc, *ptx_flags(LATER), source, "-o", ptx], check=True)
    ptxas = nvcc.parent / "ptxas"
    newer = re.findall(r"sm_1\d\d\b", subprocess.run([ptxas, "--help"], capture_output=True, text=True).stdout)
    assert "sm_120" in newer or native_build.find_nvcc().version < (12, 8)
    for architecture in dict.fromkeys(["sm_90", *newer]):
        done = subprocess.run(
            [ptxas, f"-arch={architecture}", "-v", "-warn-spills", ptx, "-o", tmp_path / "cubin"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert check_cubin.ptxas_problems(done.stderr) == []
    for architecture in ("sm_80", "sm_86", "sm_89"):  # and whoever builds for one of these alone
        subprocess.run([nvcc, "-cubin", "-std=c++17", gencode(architecture), source, "-o", ptx], check=True)


def test_only_the_fused_product_is_for_hopper_alone() -> None:
    alone = [source for source in SOURCES if architectures(source) == [HOPPER]]
    assert all("linear" in name for source in alone for name in native_build.kernel_names(source))
    assert {"unpack_tiled", "unpack_archive", "embedding", "embedding_archive", "verify"} <= {
        s.stem for s in EVERYWHERE
    }


def test_the_extension_knows_every_kernel(compiled: check_cubin.Compiled) -> None:
    assert sorted(compiled.kernels) == sorted(native_build.kernel_names(compiled.source))
    assert compiled.kernels, "a .cu file without a kernel"


def test_every_kernel_takes_one_struct(compiled: check_cubin.Compiled) -> None:
    """Device::launch passes one."""
    for name, parameters in re.findall(r"\.entry (\w+)\(([^)]*)\)", compiled.ptx):
        assert parameters.count(".param") == 1, name


def test_drivers_name_kernels_that_exist() -> None:
    kernels = {name for source in SOURCES for name in native_build.kernel_names(source)}
    named = {
        name
        for source in native_build.cuda_host_sources()
        for name in re.findall(r'"(unweight_\w+)"', source.read_text())
    }
    assert named and named == kernels


SPILLS = """
extern "C" __global__ void __launch_bounds__(1024, 2) unweight_seeded(const float4* in, float4* out, int n) {
  float4 a[24];
  for (int i = 0; i < 24; i++) a[i] = in[i * 1024 + threadIdx.x];
  for (int k = 0; k < n; k++)
    #pragma unroll
    for (int i = 0; i < 24; i++) { a[i].x += a[(i + 7) % 24].y * a[(i + 5) % 24].z; a[i].w *= a[(i + 3) % 24].x; }
  for (int i = 0; i < 24; i++) out[i * 1024 + threadIdx.x] = a[i];
}"""
# An array in registers can't be indexed at run time.
LOCAL_ARRAY = """
extern "C" __global__ void __launch_bounds__(32) unweight_seeded(const int* in, int* out, int n) {
  int a[16];
  for (int i = 0; i < 16; i++) a[i] = in[i * 32 + threadIdx.x];
  for (int k = 0; k < n; k++) a[in[k] & 15] += k;
  for (int i = 0; i < 16; i++) out[i * 32 + threadIdx.x] = a[i];
}"""
UNBOUND = 'extern "C" __global__ void unweight_seeded(int* out) { out[threadIdx.x] = 1; }'
NO_BULK_COPY = """
// expects: UBLKCP
extern "C" __global__ void __launch_bounds__(32) unweight_seeded(int* out) { out[threadIdx.x] = 1; }"""
# Each round shifts and adds 4 words: more than 4 instructions, fewer than 40.
LOOP = """
// hot loop: unweight_seeded 4 LDG
// budget: unweight_seeded {budget}
extern "C" __global__ void __launch_bounds__(32) unweight_seeded(const uint4* in, unsigned* out, int n) {{
  unsigned sum = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += 32) {{
    const uint4 four = __ldg(in + i);
    sum += (four.x >> 3) + (four.y >> 5) + (four.z >> 7) + (four.w >> 11);
  }}
  out[threadIdx.x] = sum;
}}"""


@pytest.mark.parametrize(
    "kernel, problem",
    [
        (SPILLS, r"unweight_seeded: \d+ B of local memory, spills [1-9]\d* B stored"),
        (LOCAL_ARRAY, r"unweight_seeded: [1-9]\d* B of local memory"),
        (LOCAL_ARRAY, r"unweight_seeded: \d+ accesses to local memory \(LDL\)"),
        (UNBOUND, "unweight_seeded: no __launch_bounds__"),
        (NO_BULK_COPY, "unweight_seeded: no UBLKCP, which the file expects"),
        (
            LOOP.format(budget="1.0"),
            r"unweight_seeded: [2-9]\.\d\d instructions per weight in the hot loop, .* is 1\.0",
        ),
        (LOOP.format(budget="10 or so"), "seeded.cu: not understood: // budget: unweight_seeded 10 or so"),
        (NO_BULK_COPY.replace("// expects", "//expect"), "seeded.cu: not understood: //expect: UBLKCP"),
    ],
    ids=[
        *("spills", "local array", "local array in SASS", "no bounds", "no bulk copy", "over budget"),
        *("budget with a word too many", "misspelt"),
    ],
)
def test_seeded_problems_are_found(kernel: str, problem: str, nvcc: Path, tmp_path: Path) -> None:
    source = tmp_path / "seeded.cu"
    source.write_text(kernel)
    command = [sys.executable, ROOT / "tools" / "check_cubin.py", "--nvcc", nvcc, source]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 1 and re.search(problem, done.stderr), done.stderr


def test_a_good_kernel_has_no_problems(nvcc: Path, tmp_path: Path) -> None:
    source = tmp_path / "good.cu"
    source.write_text(LOOP.format(budget="10"))
    compiled = check_cubin.compile_file(nvcc, source)
    assert compiled.problems() == []
    (loop,) = compiled.hot_loops()
    assert loop.pipes["LSU"] == 1 and loop.pipes["ALU"] >= 4 and loop.instructions == sum(loop.pipes.values())


def test_repaired_wgmma_is_a_problem() -> None:
    # As ptxas of CUDA 13.0 writes it.
    remark = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the wgmma pipeline in the function 'k'"
    )
    assert check_cubin.ptxas_problems(remark) == [remark]


@pytest.mark.parametrize(
    "registers, bounds, fits", [(128, "128, 4", True), (136, "128, 4", False), (64, "160, 2", True)]
)
def test_registers_are_those_of_whole_multiprocessors(registers: int, bounds: str, fits: bool, tmp_path: Path) -> None:
    threads, ctas = bounds.split(", ")
    compiled = check_cubin.Compiled(
        tmp_path / "kernel.cu",
        f"Function properties for k\n    0 bytes stack frame\nptxas info    : Used {registers} registers\n",
        f".visible .entry k(\n.param .b64 a\n)\n.maxntid {threads}\n.minnctapersm {ctas}\n{{",
        {"k": sass.Kernel("k", ())},
    )
    assert (compiled._too_many_registers() == []) == fits


SASS = """
.text.k:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDS R2, [R3] ;
        /*0020*/              @!P0 BRA `(.L_x_3) ;
.L_x_2:
        /*0030*/                   IMAD R4, R4, R5, R6 ;
        /*0040*/               @P1 BRA `(.L_x_2) ;
.L_x_3:
        /*0050*/               @P2 BRA `(.L_x_4) ;
        /*0060*/                   REDG.E.MAX.64.STRONG.GPU desc[UR4][R2.64], R4 ;
.L_x_4:
        /*0070*/                   LOP3.LUT R4, R4, R2, RZ, 0x3c, !PT ;
        /*0080*/                   STSM.16.M88.4 [R3], R4 ;
        /*0090*/               @P0 BRA `(.L_x_1) ;
        /*00a0*/                   EXIT ;
.L_x_5:
        /*00b0*/                   BRA `(.L_x_5);
"""


def test_the_hot_path_goes_around_what_is_rare() -> None:
    kernel = sass.parse(SASS)["k"]
    assert sorted(len(loop.blocks) for loop in kernel.loops) == [1, 5]
    path = sass.hot_path(kernel, sass.hot_loop(kernel, "STSM"), "STSM")
    assert [i.opcode for i in path] == ["LDS", "BRA", "BRA", "LOP3.LUT", "STSM.16.M88.4", "BRA"]
    assert sass.count_pipes(path) == {"LSU": 2, "ALU": 1, "control": 3}
    with pytest.raises(ValueError, match="^k: no loop holds HGMMA"):
        sass.hot_loop(kernel, "HGMMA")


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_the_bench_prints_what_the_gates_count(options: list[str], nvcc: Path, tmp_path: Path) -> None:
    source = tmp_path / "good.cu"
    source.write_text(LOOP.format(budget="10"))
    (loop,) = check_cubin.compile_file(nvcc, source).hot_loops()
    command = [sys.executable, ROOT / "bench" / "sass.py", *options, source]
    done = subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True)
    if options:
        (row,) = json.loads(done.stdout)
        assert (row["kernel"], row["total"], row["budget"]) == ("unweight_seeded", loop.per_weight, 10)
        assert sum(row["pipes"].values()) == pytest.approx(loop.per_weight)
    else:
        *_, line = done.stdout.splitlines()
        assert line.startswith("| unweight_seeded |") and line.endswith(f"| {loop.per_weight:.2f} | 10.00 |")
