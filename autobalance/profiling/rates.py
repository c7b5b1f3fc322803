"""How fast a target works: as it was measured where it is here and calibrated, else as its data sheet says."""

from __future__ import annotations

from autobalance.kernels.present import present_gpu
from autobalance.kernels.target import Target
from autobalance.measuring.calibration import Calibration, known_calibration
from autobalance.profiling.roofline import Rates, reference_rates


def rates_for(target: Target) -> Rates:
    """Rates of a target.

    Example:
        >>> rates_for(find_target("H100-80GB")).bandwidth
        3350000000000.0

    Args:
        target: whose kernels run.
    """
    sheet = reference_rates(target.name)
    if not target.is_emulated or target != present_gpu():
        return sheet
    measured = known_calibration("cuda:0")
    return sheet if measured is None else calibrated(sheet, measured)


def calibrated(sheet: Rates, measured: Calibration) -> Rates:
    """A data sheet's rates with what was measured in their place.

    Example:
        >>> calibrated(rates_of(gpu), calibration)                               # doctest: +SKIP

    Args:
        sheet: of the data sheet.
        measured: of a calibration; what it lacks stays as it is.
    """
    return Rates(
        flops={**sheet.flops, **measured.flops},
        bandwidth=measured.bandwidth or sheet.bandwidth,
        launch_time=measured.launch_time or sheet.launch_time,
        efficiency=sheet.efficiency,
    )
