"""How fast a target works: as it was measured where it is here and calibrated, else as its data sheet says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autobalance.devices.roofline import Rates, reference_rates
from autobalance.kernels.present import present_gpu
from autobalance.kernels.target import Target
from autobalance.measuring.calibration import Calibration, known_calibration
from autobalance.measuring.efficiency import calibrated_rates


def rates_for(target: Target) -> Callable[[str], Rates]:
    """Rates of a target by the class of a block: real blocks reach a share of the speed that large products do.

    Example:
        >>> rates_for(find_target("H100-80GB"))("LlamaDecoderLayer").bandwidth
        3350000000000.0

    Args:
        target: whose kernels run.
    """
    sheet = reference_rates(target.name)
    measured = known_calibration("cuda:0") if target.is_emulated and target == present_gpu() else None
    return lambda kind: sheet if measured is None else calibrated(sheet, measured, kind)


def calibrated(sheet: Rates, measured: Calibration, kind: str = "") -> Rates:
    """A data sheet's rates with what was measured in their place.

    Example:
        >>> calibrated(rates_of(gpu), calibration, "LlamaDecoderLayer")          # doctest: +SKIP

    Args:
        sheet: of the data sheet.
        measured: of a calibration; what it lacks stays as it is.
        kind: class of a block.
    """
    own = calibrated_rates(measured, kind)
    return replace(own, flops={**sheet.flops, **own.flops}, bandwidth=measured.bandwidth or sheet.bandwidth)
