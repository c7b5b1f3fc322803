from __future__ import annotations

import pytest

from autobalance.devices.table import GPUS, device_of, find_gpu, recognise


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_rows_are_plausible(gpu) -> None:
    # The label in the name is in 10**9 bytes or GiB; a process sees at most the GiB, and at least 85 % of the label.
    assert 1e12 < gpu.fp32 <= gpu.tf32 <= gpu.bf16 <= gpu.fp16
    assert gpu.link < gpu.bandwidth < 10e12
    assert 10e9 < gpu.host_link <= gpu.link
    assert 10e9 < gpu.network <= 50e9
    assert recognise(f"vendor's {gpu.driver_names[0]} card") is gpu
    if "GB" in gpu.name:
        label = int(gpu.name.split("-")[1].removesuffix("GB"))
        assert 0.9 * label * 2**30 < gpu.capacity < label * 2**30
    assert find_gpu(gpu.name) is gpu


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX2080Ti"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_the_drivers_names_are_recognised(driver_name: str, name: str) -> None:
    gpu = recognise(driver_name)
    assert gpu is not None
    assert gpu.name == name


def test_unknown_cards_are_not_guessed() -> None:
    assert recognise("NVIDIA GeForce GTX 750") is None
    assert recognise("NVIDIA A100X") is None  # not an A10
    assert find_gpu("GTX750") is None


def test_half_precision_is_told_apart_where_it_differs() -> None:
    # NVIDIA Tesla V100 datasheet: 125 TFLOPS of its tensor cores, which know no bfloat16.
    device = device_of(find_gpu("V100"))  # type: ignore[arg-type] # it is in the table
    assert (device.rate("float16"), device.rate("bfloat16")) == (125e12, 15.7e12)


def test_a_device_of_a_kind_brings_its_links() -> None:
    device = device_of(find_gpu("4090"), "cuda:3", 7, node=2)  # type: ignore[arg-type] # it is in the table
    assert (device.name, device.capacity, device.node, device.kind) == ("cuda:3", 7, 2, "RTX4090")
    assert (device.host_link, device.has_peers) == (32e9, False)
