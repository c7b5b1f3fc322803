"""How long work takes on a device, by the roofline: the slower of its arithmetic and its memory traffic.

Williams, Waterman, Patterson: "Roofline: an insightful visual performance model for multicore architectures", CACM
2009.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autobalance.devices.device import LAUNCH_TIME
from autobalance.devices.table import GPU, find_gpu, recognise

REFERENCE_GPU = "A100-40GB"
"""Whose rates stand for devices that are not there."""


@dataclass(frozen=True)
class Work:
    """Operations in one kind of arithmetic and of about one intensity, added up.

    Example:
        >>> Work("bfloat16", flops=2 * 1024**3, traffic=6 * 1024**2, launches=1)

    Attributes:
        arithmetic: "float32", "tf32", "bfloat16", ...; "" for operations without any.
        flops: floating-point operations.
        traffic: bytes read and written.
        launches: kernels.
    """

    arithmetic: str = ""
    flops: int = 0
    traffic: int = 0
    launches: int = 0


@dataclass(frozen=True)
class Rates:
    """How fast a device works.

    Example:
        >>> Rates(flops={"float32": 19.5e12, "bfloat16": 312e12}, bandwidth=1.555e12)

    Attributes:
        flops: operations per second by kind of arithmetic; one that is not named runs as "float32".
        bandwidth: bytes per second of its memory.
        launch_time: seconds the host takes for a kernel.
        efficiency: share of `flops` that real kernels reach.
    """

    flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float = 1.0
    launch_time: float = LAUNCH_TIME
    efficiency: float = 1.0


def rates_of(gpu: GPU) -> Rates:
    """The data sheet's rates of a GPU.

    Example:
        >>> rates_of(find_gpu("A100-80GB")).flops["bfloat16"]
        312000000000000.0

    Args:
        gpu: a line of the table.
    """
    return Rates(flops=dict(gpu.rates), bandwidth=gpu.bandwidth)


def reference_rates(name: str) -> Rates:
    """Rates of the GPU of that name, else of the GPU that stands for devices that are not there.

    Args:
        name: of a target: as the table has it, or as the driver calls the card.
    """
    gpu = find_gpu(name) or recognise(name) or find_gpu(REFERENCE_GPU)
    assert gpu is not None
    return rates_of(gpu)


def seconds(work: Iterable[Work], rates: Rates) -> float:
    """Time of some work on a device.

    The host launches kernels ahead of the device, which works through them: the slower of the two decides.

    Example:
        >>> seconds([Work("float32", flops=100, traffic=10)], Rates({"float32": 10.0}, bandwidth=10.0))
        10.0

    Args:
        work: what there is to do.
        rates: of the device.
    """
    on_device = on_host = 0.0
    plain = rates.flops.get("float32", 1.0)
    for part in work:
        rate = rates.flops.get(part.arithmetic, plain) * rates.efficiency
        on_device += kernel_seconds(part, rate, rates.bandwidth)
        on_host += part.launches * rates.launch_time
    return max(on_device, on_host)


def kernel_seconds(work: Work, rate: float, bandwidth: float) -> float:
    """Time of one kernel, once it runs.

    Example:
        >>> kernel_seconds(Work("float32", flops=100, traffic=10), rate=10.0, bandwidth=10.0)
        10.0

    Args:
        work: of the kernel.
        rate: operations per second in its kind of arithmetic.
        bandwidth: bytes per second of the device's memory.
    """
    return max(work.flops / rate, work.traffic / bandwidth)
