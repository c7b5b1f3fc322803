"""The efficiency of a class of blocks makes the roofline give the measured time again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autobalance.devices.roofline import Rates, Work, seconds
from autobalance.measuring import efficiency
from autobalance.measuring.calibration import Calibration, Identity
from autobalance.measuring.efficiency import calibrated_rates, efficiency_of_kinds, learn_efficiency, with_efficiency
from autobalance.measuring.measurement import Measurement
from autobalance.profiling.profile import Profile

CALIBRATION = Calibration(Identity("a GPU", "1", "2", "3"), flops={"float32": 100.0}, bandwidth=10.0, launch_time=1e-9)


def profile() -> Profile:
    made = Profile.from_costs(static=[1, 1, 1])
    work = {"forward_work": (Work("float32", 200, 1, 1),), "backward_work": (Work("float32", 400, 1, 1),)}
    rows = [replace(row, kind=kind, **work) for row, kind in zip(made.blocks, ("A", "A", "B"), strict=True)]
    return replace(made, blocks=tuple(rows))


def measurements() -> list[Measurement]:
    """Rows of A take 6 seconds by the roofline and 8 and 16 in truth, the one of B takes 6 and 6."""
    times = [(2.0, 6.0), (4.0, 12.0), (2.0, 4.0)]
    return [
        Measurement(f"block{index}", forward_time=forward, backward_time=backward)
        for index, (forward, backward) in enumerate(times)
    ]


def test_efficiency_is_roofline_over_measured_time() -> None:
    found = efficiency_of_kinds(profile(), measurements(), calibrated_rates(CALIBRATION))
    assert found == pytest.approx({"A": 12 / 24, "B": 1.0})


def test_calibrated_rates_are_slower_for_a_class_of_low_efficiency() -> None:
    calibration = with_efficiency(with_efficiency(CALIBRATION, {"B": 0.9}), {"A": 0.5})
    assert calibration.efficiency == {"B": 0.9, "A": 0.5}
    work = [Work("float32", 200, 1, 1)]
    assert seconds(work, calibrated_rates(calibration, "A")) == pytest.approx(4.0)
    assert seconds(work, calibrated_rates(calibration, "C")) == pytest.approx(2.0)
    assert calibrated_rates(calibration) == Rates({"float32": 100.0}, 10.0, 1e-9)


def test_a_block_that_was_not_measured_or_does_nothing_tells_nothing() -> None:
    assert efficiency_of_kinds(profile(), measurements()[2:], calibrated_rates(CALIBRATION)) == {"B": 1.0}
    idle = Profile.from_costs(static=[1])
    assert efficiency_of_kinds(idle, [Measurement("block0", 1.0, 1.0)], calibrated_rates(CALIBRATION)) == {}


def test_what_is_learned_is_kept_beside_what_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [with_efficiency(CALIBRATION, {"Other": 0.7})]
    monkeypatch.setattr(efficiency, "known_calibration", lambda device: kept[-1])
    monkeypatch.setattr(efficiency, "write_calibration", kept.append)
    learn_efficiency(profile(), measurements(), "cuda:0")
    expected = efficiency_of_kinds(profile(), measurements(), calibrated_rates(CALIBRATION))
    assert kept[-1].efficiency == {"Other": 0.7, **expected}


def test_nothing_is_learned_on_a_device_that_was_not_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficiency, "known_calibration", lambda device: None)
    monkeypatch.setattr(efficiency, "write_calibration", lambda calibration: pytest.fail("kept something"))
    learn_efficiency(profile(), measurements(), "cuda:0")
