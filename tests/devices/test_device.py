from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from autobalance.devices.device import Device
from autobalance.devices.roofline import reference_rates
from autobalance.saved import load, save


@dataclass(frozen=True)
class Machine:
    devices: tuple[Device, ...]


def test_impossible_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="'mine' has a capacity of -1 bytes"):
        Device("mine", -1)
    with pytest.raises(ValueError, match="'mine' has link=0; rates must be above 0"):
        Device("mine", 1, link=0)


@pytest.mark.parametrize("capacity", ["8GiB", 8.5, True])
def test_a_capacity_is_a_whole_number_of_bytes(capacity: object) -> None:
    with pytest.raises(TypeError, match=r"'mine' has the capacity .*; it is a whole number of bytes"):
        Device("mine", capacity)  # type: ignore[arg-type] # the wrong type is what is tested


def test_a_device_without_rates_is_as_fast_as_it_says_or_as_an_a100() -> None:
    # NVIDIA A100 datasheet
    assert (Device("plain", 1).rate("float32"), Device("plain", 1).rate("bfloat16")) == (19.5e12, 312e12)
    assert (Device("mine", 1, flops=7.0).rate("float32"), Device("mine", 1, flops=7.0).rate("bfloat16")) == (7.0, 7.0)
    assert Device("mine", 1, flops=7.0, rates=(("bfloat16", 9.0),)).rate("bfloat16") == 9.0


def test_plain_devices_are_as_fast_as_the_gpu_that_times_profiles_made_without_one() -> None:
    rates, plain = reference_rates("no such card"), Device("plain", 1)
    assert (dict(plain.rates), plain.bandwidth, plain.launch_time) == (rates.flops, rates.bandwidth, rates.launch_time)


def test_impossible_rates_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'mine' has rates of 'bfloat16'=-1; rates must be above 0"):
        Device("mine", 1, rates=(("bfloat16", -1),))
    with pytest.raises(ValueError, match="'mine' has network=nan"):
        Device("mine", 1, network=float("nan"))


def test_devices_work_alike_whatever_they_are_called_and_hold() -> None:
    assert Device("a", 1).speed == Device("b", 2, real=True).speed
    assert Device("a", 1).speed != Device("a", 1, node=1).speed


def test_a_device_is_read_as_it_was_saved(tmp_path: Path) -> None:
    device = Device("cuda:1", 5, 1e13, node=1, has_peers=False, links=(("cuda:0", 2e9),), efficiency=(("Linear", 0.5),))
    save(tmp_path / "devices.json", "devices", Machine((device,)))
    assert load(tmp_path / "devices.json", "devices", Machine) == Machine((device,))
