"""Which GPUs and drivers are refused, and what is said: found, needed, and what works instead, in one line."""

from __future__ import annotations

import re

import pytest
from native_module import native

CUDA_13 = 13000
ONE_LINE = re.compile(r"[^\n]+")


@pytest.mark.parametrize("driver", [12040, 13000, 13020, 14000])
def test_drivers_of_the_build_s_major_and_newer_ones_will_do(driver: int) -> None:
    native.check_driver(driver, driver // 1000 * 1000 + 30)
    native.check_driver(driver, 12080)


def refusal(check, *arguments: int) -> str:
    with pytest.raises(native.Error) as error:
        check(*arguments)
    assert ONE_LINE.fullmatch(str(error.value))
    return str(error.value)


def test_no_driver() -> None:
    text = refusal(native.check_driver, 0, CUDA_13)
    assert text.startswith(
        "CUDA: no NVIDIA driver is installed, expected one for a GPU of compute capability 8.0 or newer"
    )


def test_a_driver_that_is_too_old() -> None:
    assert refusal(native.check_driver, 12090, CUDA_13) == (
        "CUDA: the driver is for CUDA 12.9, this build of unweight-ext needs one for CUDA 13.0: install a newer "
        "driver, or build it with an older nvcc (from 12.4 on)"
    )


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
def test_gpus_that_unpack(capability: tuple[int, int]) -> None:
    native.check_gpu(1, *capability, CUDA_13, CUDA_13)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (6, 1)])
def test_gpus_that_are_too_old(capability: tuple[int, int]) -> None:
    for check in (native.check_gpu, native.check_fused_gpu):
        text = refusal(check, 1, *capability, CUDA_13, CUDA_13)
        assert text.startswith(
            f"device: cuda:1 has compute capability {capability[0]}.{capability[1]}, expected 8.0 or newer"
        )
        assert text.endswith("unpack(packed.cpu()).to(device)")


def test_later_gpus_need_a_driver_that_reads_the_build_s_ptx() -> None:
    native.check_gpu(0, 9, 0, 13000, 13010)  # code of its own: any driver of the major will do
    native.check_gpu(0, 8, 9, 13000, 13010)
    for check in (native.check_gpu, native.check_fused_gpu):
        text = refusal(check, 0, 12, 0, 13000, 13010)
        assert "compute capability 12.0" in text and "is for CUDA 13.0, expected 13.1 or newer" in text


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_the_fused_product_is_for_hopper_alone(capability: tuple[int, int]) -> None:
    native.check_fused_gpu(0, 9, 0, CUDA_13, CUDA_13)
    text = refusal(native.check_fused_gpu, 0, *capability, CUDA_13, CUDA_13)
    assert text.startswith(
        f"device: cuda:0 has compute capability {capability[0]}.{capability[1]}, expected 9.0 (Hopper"
    )
    assert text.endswith("use exact=True, which unpacks the weight and calls F.linear")
