"""Small kernels written as PTX, for tests of the interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ptxsim import Kind, Machine, Report, parse_ptx
from ptxsim.memory import Region

HEAD = """
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
"""


def module_text(body: str, parameters=(), declarations: str = "", head: str = HEAD) -> str:
    """A module with the kernel `k`. Line i of the body (the first is 1) is line i of test.cu. Parameter `x` is in the
    64-bit register %x; %r0… and %d0… (32 and 64 bits), %f0…, %p0… and %t (tid.x) are there."""
    lines = body.strip("\n").split("\n")
    if ".loc " not in body:
        lines = [f"\t.loc 1 {i} 1\n{line}" if line.strip() else "" for i, line in enumerate(lines, 1)]
    numbered = "\n".join(lines)
    declared = ",\n".join(f"\t.param .u64 k_{name}" for name in parameters)
    loads = "\n".join(f"\t.reg .b64 %{name};\n\tld.param.u64 %{name}, [k_{name}];" for name in parameters)
    return f"""{head}
{declarations}
.visible .entry k(
{declared}
)
{{
	.reg .b32 %r<40>;
	.reg .b64 %d<40>;
	.reg .f32 %f<10>;
	.reg .pred %p<10>;
	.reg .b32 %t;
	.loc 1 1000 1
{loads}
	mov.u32 %t, %tid.x;
{numbered}
	ret;
}}
	.file 1 "/somewhere/test.cu"
"""


@dataclass
class Result:
    machine: Machine
    reports: list[Report]
    tensors: dict

    def kinds(self) -> set[Kind]:
        return {report.kind for report in self.reports}

    def values(self, name: str, dtype=np.uint32) -> np.ndarray:
        region = self.tensors[name]
        return region.data[: region.size].view(dtype)

    def only(self, kind: Kind, line: int) -> Report:
        """The one report there is, of this kind and at this line of the body."""
        texts = "\n".join(str(report) for report in self.reports) or "no report"
        assert len(self.reports) == 1, texts
        (report,) = self.reports
        assert report.kind == kind and report.line == line, texts
        return report


def run(
    body: str,
    grid=1,
    block=32,
    shared=0,
    seed=0,
    declarations="",
    readonly=(),
    machine=None,
    programmatic=False,
    **tensors,
) -> Result:
    """Runs the kernel with tensors as parameters: an array, or a number of bytes of unknown content."""
    machine = machine or Machine(seed=seed, step_budget=20_000)
    regions = {
        name: content if isinstance(content, Region) else machine.allocate(content, name, name in readonly)
        for name, content in tensors.items()
    }
    module = parse_ptx(module_text(body, tuple(tensors), declarations))
    arguments = np.array([region.base for region in regions.values()], np.uint64).tobytes()
    kernel = module.kernels["k"]
    reports = machine.launch(kernel, grid, block, shared, arguments, check=False, programmatic=programmatic)
    return Result(machine, reports, regions)


def clean(body: str, **arguments) -> Result:
    """The same, and there is nothing to report under any of a few seeds. Returns the last result."""
    for seed in range(4):
        result = run(body, seed=seed, **arguments)
        assert not result.reports, "\n".join(str(report) for report in result.reports)
    return result


# out[t] = %r0, for a tensor `out` of 32-bit words.
STORE = "mul.wide.u32 %d0, %t, 4; add.s64 %d0, %out, %d0; st.global.u32 [%d0], %r0;"
