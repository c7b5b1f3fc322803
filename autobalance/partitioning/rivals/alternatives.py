"""What a user would pick instead of a split model, by formula: DDP, FSDP full shard, ZeRO-3 with offload.

All of them give every device a part of the batch and let it run all blocks. Devices are alike to them: the one with the
least memory and the slowest decide.

Sources: ring collectives move `(N - 1) / N` of the bytes per device and pass, an all-reduce takes two passes (Patarasu,
Yuan: "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009). Sharded training gathers
weights for the forward and again for the backward and scatters the sums of gradients, three passes (Rajbhandari et al.:
"ZeRO: memory optimizations toward training trillion parameter models", SC 2020, section 7.2; Zhao et al.: "PyTorch
FSDP", VLDB 2023, sections 3 and 4.2). Weights, gradients and optimizer state in host memory: Rajbhandari et al.:
"ZeRO-Infinity", SC 2021.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autobalance.devices.device import Device
from autobalance.devices.links import link_matrix
from autobalance.partitioning.savings.host_optimizer import HOST_BANDWIDTH
from autobalance.partitioning.times import block_seconds, launch_seconds, optimizer_seconds
from autobalance.partitioning.work_table import Seconds
from autobalance.profiling.profile import Profile

_MIXED = ("16-mixed", "bf16-mixed")


@dataclass(frozen=True)
class Alternative:
    """One way to train or run the model on the same devices with the same batch in total.

    Example:
        >>> ddp, fsdp, zero = alternatives_of(profile, plan.devices, plan.budgets)
        >>> ddp.fits, fsdp.step_time

    Attributes:
        name: `"DDP"`, `"FSDP full shard"` or `"ZeRO-3 with offload"`.
        peak: most bytes on each device.
        budget: bytes that each device may hold: the least of all.
        host: bytes in the memory of each host.
        moved: bytes that each device sends per step, to other devices and to the host.
        step_time: seconds of the forwards and backwards of a step.
        optimizer_time: seconds of the optimizer's step after them.
        parts: parts in which each device runs its share of the batch, adding gradients up; the fewest that fit.
        notes: what the figures take for granted.
    """

    name: str
    peak: int
    budget: int
    host: int
    moved: int
    step_time: float
    optimizer_time: float
    parts: int
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every device can hold it."""
        return self.peak <= self.budget


def alternatives_of(profile: Profile, devices: Sequence[Device], budgets: Sequence[int]) -> tuple[Alternative, ...]:
    """DDP, FSDP full shard and ZeRO-3 with offload, on these devices and for the batch of the profile.

    Example:
        >>> [(other.name, other.fits) for other in alternatives_of(profile, plan.devices, plan.budgets)]

    Args:
        profile: of the whole batch; it has to know how bytes depend on the number of samples.
        devices: N of them; each runs `ceil(batch / N)` samples.
        budgets: bytes that each may hold.

    Raises:
        ValueError: the profile cannot be scaled to a part of its batch.
    """
    share = -(-profile.batch_size // len(devices)) if profile.batch_size else 0
    if not share or not profile.timeline.per_sample:
        raise ValueError(
            "what each device would run with a part of the batch is not known: this profile does not say how bytes "
            "depend on the number of samples. Make it from a batch whose size is found, or say batch_size="
        )
    parts = _Parts(profile, devices, share)
    return tuple(
        _fewest_parts(make, parts, share, min(budgets)) for make in (_replicated, _sharded, _sharded_with_offload)
    )


class _Parts:
    """The profile with fewer samples, on the device that is slowest with them."""

    def __init__(self, profile: Profile, devices: Sequence[Device], share: int) -> None:
        self.whole, self.devices, self.share = profile, tuple(devices), share
        self._known: dict[int, _Part] = {}

    def of(self, samples: int) -> _Part:
        if samples not in self._known:
            self._known[samples] = _Part(self.whole.scaled(samples), self.devices)
        return self._known[samples]


class _Part:
    """One forward and backward of so many samples on one device."""

    def __init__(self, profile: Profile, devices: Sequence[Device]) -> None:
        self.profile, self.devices = profile, devices
        rows = profile.blocks
        self.weights = np.array([row.weights for row in rows], dtype=np.float64)
        self.gradients = np.array([row.gradients for row in rows], dtype=np.float64)
        # A profile by hand tells no gradients apart; there are as many as weights.
        self.tells_gradients = not profile.training or bool(self.gradients.any())
        self.summed = self.gradients if self.tells_gradients else self.weights
        self.optimizer, self.buffers = (sum(getattr(row, what) for row in rows) for what in ("optimizer", "buffers"))
        halved = np.array([profile.precision in _MIXED and row.dtype in ("", "float32") for row in rows])
        self.sent = np.where(halved, 0.5, 1.0)
        times = {device.speed: block_seconds(profile, device, devices) for device in devices}
        self.forward, self.backward = max(times.values(), key=lambda pair: float(pair[0].sum() + pair[1].sum()))
        self.launch = launch_seconds(profile, devices)

    @property
    def activations(self) -> float:
        """Bytes beside what stays: at most what the replay has above the weights, and what the rows add up to."""
        rows, timeline = self.profile.blocks, self.profile.timeline
        passing = max(max(row.forward_transient, row.backward_transient) for row in rows)
        by_rows = float(sum(row.saved for row in rows) + passing)
        if self.optimizer and len(timeline.steps) < 2:
            return by_rows  # its state is there from the second step on
        last = timeline.steps[-1] if timeline.steps else None
        above = self.profile.peak(last, phase="forward+backward" if timeline.steps else None)
        above -= int(self.weights.sum()) + self.optimizer + self.buffers
        return min(by_rows, float(max(0, above)))

    @property
    def two_units(self) -> float:
        """Bytes of gathered weights: a block at work and the one that is fetched meanwhile, and a block's gradients."""
        gathered = self.weights * self.sent
        pairs = gathered[:-1] + gathered[1:] if len(gathered) > 1 else gathered
        return float(pairs.max() + (self.gradients * self.sent).max())


def _fewest_parts(
    make: Callable[[_Parts, int, int], Alternative], parts: _Parts, share: int, budget: int
) -> Alternative:
    made = make(parts, 1, budget)
    for count in _counts(share):
        made = make(parts, count, budget)
        if made.fits:
            break
    return made


def _counts(share: int) -> Iterator[int]:
    """1, 2, 4, ... parts, and one sample each at last."""
    count = 1
    while count < share:
        yield count
        count *= 2
    yield share


def _replicated(parts: _Parts, count: int, budget: int) -> Alternative:
    """Every device holds the whole model; gradients are summed over all devices while the backward runs."""
    part, others = parts.of(-(-parts.share // count)), len(parts.devices)
    moved = 2 * (others - 1) / others * float(part.summed.sum()) * part.profile.training
    all_reduce = moved / ring_bandwidth(parts.devices)
    forward, backward = float(part.forward.sum()), float(part.backward.sum())
    # Only the backward of the last part sends: `no_sync` holds the others back.
    seconds = (count - 1) * (forward + backward) + forward + max(backward, all_reduce)
    return Alternative(
        "DDP",
        part.profile.peak(),
        budget,
        0,
        round(moved),
        max(seconds, count * part.launch),
        _whole_optimizer(part),
        count,
        (
            *["gradients are summed while the backward runs, in place (gradient_as_bucket_view=True)"]
            * part.profile.training,
            *_assumed(part),
        ),
    )


def _sharded(parts: _Parts, count: int, budget: int) -> Alternative:
    """Every device holds an equal share of all that stays, and gathers the weights of each block when it runs."""
    part, others = parts.of(-(-parts.share // count)), len(parts.devices)
    stays = float(part.weights.sum() + part.gradients.sum()) + part.optimizer
    ring = ring_bandwidth(parts.devices)
    gather, scatter = _passes(part, others)
    return Alternative(
        "FSDP full shard",
        round(stays / others + part.buffers + part.two_units + part.activations),
        budget,
        0,
        round(count * float((2 if part.profile.training else 1) * gather.sum() + scatter.sum())),
        max(count * _beside(part, gather / ring, scatter / ring), count * part.launch),
        _whole_optimizer(part) / others,
        count,
        ("the weights of a block are gathered while the one before it runs", *_assumed(part)),
    )


def _sharded_with_offload(parts: _Parts, count: int, budget: int) -> Alternative:
    """What stays lies in the memory of the hosts, where the optimizer runs too; weights come over the host link."""
    part, others = parts.of(-(-parts.share // count)), len(parts.devices)
    stays = float(part.weights.sum() + part.gradients.sum()) + part.optimizer
    on_one_host = max(Counter(device.node for device in parts.devices).values())
    ring, host_link = ring_bandwidth(parts.devices), min(device.host_link for device in parts.devices)
    gather, scatter = _passes(part, others)
    fetched, returned = part.weights * part.sent / others, part.summed * part.sent / others
    ways = 2 if part.profile.training else 1
    moved = ways * float(gather.sum() + fetched.sum()) + float(scatter.sum() + returned.sum() * part.profile.training)
    waits = np.maximum(gather / ring, fetched / host_link), np.maximum(scatter / ring, returned / host_link)
    # The optimizer reads and writes as many bytes as on a device, over the memory of the host.
    slowest = min(parts.devices, key=lambda device: device.bandwidth)
    touched = _whole_optimizer(part) * slowest.bandwidth * on_one_host / others
    return Alternative(
        "ZeRO-3 with offload",
        round(part.buffers + part.two_units + part.activations),
        budget,
        round(stays * on_one_host / others),
        round(count * moved),
        max(count * _beside(part, *waits), count * part.launch),
        touched / HOST_BANDWIDTH,
        count,
        (
            "the weights of a block come from the host while the one before it runs",
            *[f"the optimizer runs on the CPU at {HOST_BANDWIDTH / 1e9:.0f} GB/s of the host's memory"]
            * part.profile.training,
            *_assumed(part),
        ),
    )


def ring_bandwidth(devices: Sequence[Device]) -> float:
    """Bytes per second and device of a ring over all devices: what its slowest link does.

    Between nodes as many rings run side by side as a node has devices, each with a network adapter.

    Example:
        >>> ring_bandwidth(parse_devices("2 nodes x 8xH100"))
        400000000000.0

    Args:
        devices: in the order of the ring; those of one node stand together. One device needs no link: infinite.
    """
    if len(devices) < 2:
        return float("inf")
    links = link_matrix(devices)
    adapters = min(Counter(device.node for device in devices).values())
    following = [*range(1, len(devices)), 0]
    return min(
        float(links[one, other]) * (adapters if devices[one].node != devices[other].node else 1)
        for one, other in enumerate(following)
    )


def _passes(part: _Part, others: int) -> tuple[Seconds, Seconds]:
    """Bytes that each device sends to gather every block's weights once, and to scatter the sums of its gradients."""
    away = (others - 1) / others
    return away * part.weights * part.sent, away * part.summed * part.sent * part.profile.training


def _beside(part: _Part, gather: Seconds, scatter: Seconds) -> float:
    """Seconds of a forward and a backward in which each block's transfers run beside another block's work."""
    forward = float(np.maximum(part.forward, gather).sum())
    if not part.profile.training:
        return float(gather[0]) + forward
    return float(gather[0]) + forward + float(np.maximum(part.backward, gather + scatter).sum())


def _whole_optimizer(part: _Part) -> float:
    """Seconds of the optimizer's step over the whole model on the device that takes longest."""
    slowest = min(range(len(part.devices)), key=lambda index: part.devices[index].bandwidth)
    return optimizer_seconds(part.profile, [slowest] * len(part.profile.blocks), part.devices)[slowest]


def _assumed(part: _Part) -> tuple[str, ...]:
    if part.tells_gradients:
        return ()
    return ("this profile does not tell gradients apart: all that stays counts as weights, with as many gradients",)
