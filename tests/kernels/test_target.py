from __future__ import annotations

import re

import pytest

from autobalance.kernels.target import Target, find_target


@pytest.mark.parametrize(
    ("word", "capability"),
    # CUDA C++ programming guide, "CUDA-enabled GPUs"
    [
        ("A100-80GB", (8, 0)),
        ("v100", (7, 0)),
        ("T4", (7, 5)),
        ("H100", (9, 0)),
        ("4090", (8, 9)),
        ("RTX 4090", (8, 9)),
        ("A10G", (8, 6)),
    ],
)
def test_a_gpu_is_found_by_its_name(word: str, capability: tuple[int, int]) -> None:
    target = find_target(word)
    assert (target.kind, target.capability) == ("cuda", capability)


def test_a_gpu_of_amd_has_its_own_kernels() -> None:
    target = find_target("MI300X")
    assert (target.kind, target.capability) == ("hip", (9, 4))


def test_cuda_is_the_gpu_that_is_there_and_an_a100_where_none_is() -> None:
    present = Target("cuda", "some card", (12, 0))
    assert find_target("cuda", present) is present
    assert find_target("cuda").capability == (8, 0)


def test_the_cpu_counts_every_byte_and_devices_round_up() -> None:
    assert find_target("cpu").granule == 1
    assert find_target("cuda").granule == find_target("simulated").granule == 512


def test_an_unknown_word_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=re.escape("target='tpu' names no kernels that autobalance knows")) as error:
        find_target("tpu")
    assert "A100-80GB" in str(error.value)
