"""What share of the roofline's speed real blocks reach, learned from measured times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autobalance.devices.device import LAUNCH_TIME
from autobalance.devices.roofline import Rates, seconds
from autobalance.measuring.calibration import Calibration, known_calibration, write_calibration
from autobalance.measuring.measurement import Measurement
from autobalance.profiling.profile import Profile


def efficiency_of_kinds(profile: Profile, measurements: Sequence[Measurement], rates: Rates) -> dict[str, float]:
    """Time by the roofline over measured time, forward and backward together, for each class of block.

    Example:
        >>> efficiency_of_kinds(profile, measure(model, ...), calibrated_rates(calibration))   # doctest: +SKIP

    Args:
        profile: of the model that was measured.
        measurements: of its blocks.
        rates: of the device on which they were measured, with an efficiency of 1.

    Returns:
        The share by class name; classes without work or without a measured time are left out.
    """
    measured = {measurement.name: measurement for measurement in measurements}
    ideal: dict[str, float] = defaultdict(float)
    real: dict[str, float] = defaultdict(float)
    for row in profile.blocks:
        if row.name in measured:
            ideal[row.kind] += seconds(row.forward_work, rates) + seconds(row.backward_work, rates)
            real[row.kind] += measured[row.name].forward_time + measured[row.name].backward_time
    return {kind: ideal[kind] / took for kind, took in real.items() if took > 0 and ideal[kind] > 0}


def with_efficiency(calibration: Calibration, efficiency: Mapping[str, float]) -> Calibration:
    """A calibration that knows these classes of blocks, beside those it knew.

    Args:
        calibration: of the device.
        efficiency: share by class name.
    """
    return replace(calibration, efficiency={**calibration.efficiency, **efficiency})


def learn_efficiency(profile: Profile, measurements: Sequence[Measurement], device: str) -> None:
    """Keep in the calibration of a device what share of its speed these blocks reached; nothing without a calibration.

    Args:
        profile: of the model that was measured, with its calculated work.
        measurements: of its blocks.
        device: on which they were measured.
    """
    known = known_calibration(device)
    if known is not None:
        write_calibration(with_efficiency(known, efficiency_of_kinds(profile, measurements, calibrated_rates(known))))


def calibrated_rates(calibration: Calibration, kind: str = "") -> Rates:
    """The measured rates of a device, for the roofline.

    Example:
        >>> calibrated_rates(known_calibration("cuda:0"), "LlamaDecoderLayer")                 # doctest: +SKIP

    Args:
        calibration: of the device.
        kind: class of a block; its efficiency is that of its class where that was measured, else 1.
    """
    return Rates(
        flops=calibration.flops,
        bandwidth=calibration.bandwidth or 1.0,
        launch_time=calibration.launch_time or LAUNCH_TIME,
        efficiency=calibration.efficiency.get(kind, 1.0),
    )
