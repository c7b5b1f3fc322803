from __future__ import annotations

import pytest

from autobalance.devices.table import GPUS, find_gpu, recognise


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_rows_are_plausible(gpu) -> None:
    # The label in the name is in 10**9 bytes or GiB; a process sees at most the GiB, and at least 85 % of the label.
    assert 10e12 < 10 * gpu.fp32 <= 10 * gpu.tf32 <= 10 * gpu.bf16
    assert gpu.link < gpu.bandwidth < 10e12
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
    ],
)
def test_the_drivers_names_are_recognised(driver_name: str, name: str) -> None:
    gpu = recognise(driver_name)
    assert gpu is not None
    assert gpu.name == name


def test_unknown_cards_are_not_guessed() -> None:
    assert recognise("NVIDIA GeForce GTX 750") is None
    assert find_gpu("GTX750") is None
