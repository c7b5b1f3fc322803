"""Time by the roofline, against hand calculation and data sheets."""

from __future__ import annotations

import pytest

from autobalance.devices.roofline import Rates, Work, reference_rates, seconds

RATES = Rates({"float32": 10.0, "bfloat16": 40.0}, bandwidth=5.0, launch_time=0.5)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ([Work("float32", flops=100, traffic=10)], 10.0),  # arithmetic: 100 / 10
        ([Work("float32", flops=10, traffic=100)], 20.0),  # traffic: 100 / 5
        ([Work("bfloat16", flops=100, traffic=10)], 2.5),  # 100 / 40
        ([Work("int8", flops=100)], 10.0),  # an unknown kind runs as float32
        ([Work("float32", flops=100), Work(traffic=100)], 30.0),  # one after the other, not at once
        ([Work("float32", flops=100, launches=30)], 15.0),  # the host is slower: 30 * 0.5
        ([], 0.0),
    ],
)
def test_the_slower_of_arithmetic_traffic_and_launches_decides(work: list[Work], expected: float) -> None:
    assert seconds(work, RATES) == pytest.approx(expected)


def test_efficiency_slows_arithmetic_only() -> None:
    rates = Rates({"float32": 10.0}, bandwidth=5.0, efficiency=0.5)
    assert seconds([Work("float32", flops=100, traffic=10)], rates) == pytest.approx(20.0)
    assert seconds([Work(traffic=10)], rates) == pytest.approx(2.0)


def test_rates_are_the_data_sheets() -> None:
    assert reference_rates("H100-80GB").bandwidth == 3350e9
    assert reference_rates("NVIDIA H100 80GB HBM3").bandwidth == 3350e9  # as the driver calls it
    assert reference_rates("no such card").flops["tf32"] == 156e12  # NVIDIA A100 data sheet
