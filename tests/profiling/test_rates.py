from __future__ import annotations

from dataclasses import replace

import pytest

from autobalance.kernels.target import Target, find_target
from autobalance.measuring.calibration import Calibration, Identity
from autobalance.profiling import rates
from autobalance.profiling.rates import rates_for

MEASURED = Calibration(Identity("my card", "1", "2", "3"), flops={"float32": 9e12}, bandwidth=7e11, launch_time=8e-6)


def test_what_was_measured_on_the_gpu_here_replaces_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Target("cuda", "A100-40GB", (8, 0))
    monkeypatch.setattr(rates, "present_gpu", lambda: card)
    monkeypatch.setattr(rates, "known_calibration", lambda device: MEASURED)
    found = rates_for(card)("Linear")
    assert (found.flops["float32"], found.bandwidth, found.launch_time) == (9e12, 7e11, 8e-6)
    assert found.flops["bfloat16"] == 312e12  # not measured: NVIDIA A100 data sheet


def test_a_gpu_that_is_not_here_has_the_rates_of_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "present_gpu", lambda: Target("cuda", "A100-40GB", (8, 0)))
    monkeypatch.setattr(rates, "known_calibration", lambda device: MEASURED)
    assert rates_for(find_target("H100-80GB"))("Linear").bandwidth == 3350e9
    assert rates_for(find_target("simulated"))("Linear").bandwidth == 1555e9


def test_a_class_of_blocks_that_was_measured_has_its_own_efficiency(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Target("cuda", "A100-40GB", (8, 0))
    monkeypatch.setattr(rates, "present_gpu", lambda: card)
    monkeypatch.setattr(rates, "known_calibration", lambda device: replace(MEASURED, efficiency={"Layer": 0.4}))
    assert rates_for(card)("Layer").efficiency == 0.4
    assert rates_for(card)("Head").efficiency == 1.0
