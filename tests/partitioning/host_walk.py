"""Stages that keep a part of themselves on the host: every way to do so, and a walk through their steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from autobalance.partitioning.plan import Plan
from autobalance.partitioning.savings.host_optimizer import HOST_BANDWIDTH
from autobalance.profiling.profile import BlockCost, Profile

LINK = 20.0


@dataclass(frozen=True)
class Row:
    """A block: bytes that stay, bytes and seconds of a micro-batch; no gradient and no state: it is frozen."""

    weights: int
    gradients: int = 0
    state: int = 0
    saved: int = 0
    transient: int = 0
    seconds: float = 1.0


@dataclass(frozen=True)
class Way:
    """What the blocks of a device do."""

    host_optimizer: bool
    offloads: tuple[bool, ...]
    streams: tuple[bool, ...]


def profile_of(rows: Sequence[Row], micro_batches: int = 1) -> Profile:
    whole = Profile.from_costs(
        [row.weights + row.gradients + row.state for row in rows],
        [row.saved * micro_batches for row in rows],
        [row.transient * micro_batches for row in rows],
        [row.seconds * micro_batches / 3 for row in rows],
        [row.seconds * micro_batches * 2 / 3 for row in rows],
        batch_size=micro_batches,
    )

    def parts(blocks: Sequence[BlockCost]) -> tuple[BlockCost, ...]:
        pairs = zip(blocks, rows, strict=True)
        return tuple(replace(b, weights=r.weights, gradients=r.gradients, optimizer=r.state) for b, r in pairs)

    return replace(whole, blocks=parts(whole.blocks), other_blocks=parts(whole.other_blocks))


def device_peak(rows: Sequence[Row], way: Way, in_flight: int) -> int:
    """A walk: so many forwards, then backward and forward in turn, then backwards; weights come one block ahead."""
    stays = [
        row.weights + row.gradients + (0 if way.host_optimizer else row.state)
        for row, streams in zip(rows, way.streams, strict=True)
        if not streams
    ]
    slots = [row.weights + row.gradients for row, streams in zip(rows, way.streams, strict=True) if streams]
    held = sum(stays) + max((here + ahead for here, ahead in zip(slots, [*slots[1:], 0], strict=False)), default=0)
    peak, passes = held, "f" * in_flight + "bf" * 2 + "b" * in_flight
    for each in passes:
        blocks = list(zip(rows, way.offloads, strict=True))
        for row, offloads in blocks if each == "f" else reversed(blocks):
            peak = max(peak, held + row.transient + (row.saved if each == "b" and offloads else 0))
            peak = max(peak, held + row.saved * (each == "f"))
            held += 0 if offloads else row.saved * (1 if each == "f" else -1)
    return peak


def device_seconds(rows: Sequence[Row], way: Way, micro_batches: int, devices: int) -> float:
    """Seconds of a micro-batch, with its share of what the optimizer takes on the host."""
    carried = sum(2 * row.saved for row, offloads in zip(rows, way.offloads, strict=True) if offloads)
    carried += sum(2 * row.weights + row.gradients for row, goes in zip(rows, way.streams, strict=True) if goes)
    seconds = max(sum(row.seconds for row in rows), carried / LINK)
    if way.host_optimizer:
        moved = sum(2 * row.gradients for row in rows if row.state)
        traffic = sum(3 * row.gradients + 2 * row.state for row in rows if row.state)
        seconds += (moved / LINK + traffic * min(micro_batches, devices) / HOST_BANDWIDTH) / micro_batches
    return seconds


def host_bytes(rows: Sequence[Row], way: Way, in_flight: int) -> int:
    """Pinned memory in powers of two, and what state takes."""

    def pinned(size: int) -> int:
        return 1 << (size - 1).bit_length() if size else 0

    found = sum(in_flight * pinned(row.saved) for row, goes in zip(rows, way.offloads, strict=True) if goes)
    found += sum(
        pinned(row.weights) + pinned(row.gradients) for row, goes in zip(rows, way.streams, strict=True) if goes
    )
    return found + sum(row.state + 2 * pinned(row.gradients) for row in rows if row.state and way.host_optimizer)


def ways(rows: Sequence[Row]) -> Iterator[Way]:
    """All of them; weights whose block has state stream only where the optimizer is on the host."""
    flags = [(False, True)] * len(rows)
    for host, offloads, streams in product((False, True), product(*flags), product(*flags)):
        if (host or not any(row.state and goes for row, goes in zip(rows, streams, strict=True))) and not any(
            goes and not row.saved for row, goes in zip(rows, offloads, strict=True)
        ):
            yield Way(host, offloads, streams)


def stages_in(plan: Plan, rows: Sequence[Row]) -> list[tuple[int, list[Row], Way]]:
    """Device, rows and way of every stage of a plan."""
    saving = plan.saving or ("keep",) * len(rows)
    return [
        (
            stage.device,
            [rows[block] for block in stage.blocks],
            Way(
                stage.device in plan.host_optimizer,
                tuple(saving[block] == "offload" for block in stage.blocks),
                tuple(block in plan.streamed for block in stage.blocks),
            ),
        )
        for stage in plan.stages
    ]


def random_rows(rng: random.Random, blocks: int) -> list[Row]:
    rows = []
    for _ in range(blocks):
        weights, is_trained = rng.randint(1, 12), rng.random() < 0.7
        state = weights * rng.choice((0, 1, 2, 2)) if is_trained else 0
        rows.append(
            Row(weights, weights * is_trained, state, rng.randint(0, 8), rng.randint(0, 5), rng.uniform(0.2, 2.0))
        )
    return rows
