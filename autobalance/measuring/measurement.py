"""What blocks took on a real device, and a profile that has learned it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autobalance.profiling.profile import BlockCost, Profile
from autobalance.units import format_size

TOLERANCE = 0.01
"""Share by which measured and traced bytes may differ before a note says so."""


@dataclass(frozen=True)
class Measurement:
    """What one block took when it ran on a device alone.

    Example:
        >>> Measurement("layers.0", forward_time=1e-3, backward_time=2e-3, static=4096)

    Attributes:
        name: of the block, as the profile has it.
        forward_time, backward_time: seconds, the median of several passes; of all its calls in one step.
        static: bytes of weights and buffers.
        saved: bytes that its graph keeps from forward to backward, saved inputs and outputs among them.
        forward_peak, backward_peak: most bytes on the device at once, static bytes included.
        exact: False where the whole batch did not fit and figures are extrapolated from smaller ones.
        like: name of the equal block that was measured in its place; "" where it was measured itself.
        notes: in words, how figures were extrapolated.
    """

    name: str
    forward_time: float = 0.0
    backward_time: float = 0.0
    static: int = 0
    saved: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    exact: bool = True
    like: str = ""
    notes: tuple[str, ...] = ()


def with_measurements(profile: Profile, measurements: Sequence[Measurement]) -> Profile:
    """A profile with measured times, and a note wherever measured bytes differ from the traced ones.

    The bytes stay the traced ones: a plan has to know them for every placement, which only a trace can tell.

    Example:
        >>> profile = with_measurements(profile, measure(model, batch, blocks, trial, device))  # doctest: +SKIP

    Args:
        profile: of the same model and batch.
        measurements: one for each block, in any order; blocks that have none keep their times.

    Returns:
        The profile.

    Raises:
        ValueError: a measurement is of a block that the profile lacks.
    """
    found = {measurement.name: measurement for measurement in measurements}
    strangers = sorted(set(found) - set(profile.names))
    if strangers:
        raise ValueError(
            f"measured blocks that the profile lacks: {', '.join(strangers)}; measure the model that was profiled"
        )
    blocks = tuple(
        replace(row, forward_time=found[row.name].forward_time, backward_time=found[row.name].backward_time)
        if row.name in found
        else row
        for row in profile.blocks
    )
    pairs = [(row, found[row.name]) for row in profile.blocks if row.name in found]
    tied = {profile.names[block] for group in profile.together for block in group}  # traced as if they were one
    compared = [pair for pair in pairs if pair[0].name not in tied]
    notes = [*profile.notes, *(note for _, measured in pairs for note in measured.notes), *_differences(compared)]
    return replace(profile, blocks=blocks, notes=tuple(dict.fromkeys(notes)))


def _differences(pairs: Sequence[tuple[BlockCost, Measurement]]) -> Iterator[str]:
    """One note for each block of which the device held more than the trace says, and one for all that held less."""
    less: list[tuple[float, str]] = []
    for row, measured in pairs:
        compared = _compared(row, measured)
        more = [
            f"{what} {format_size(seen)} measured, {format_size(traced)} traced"
            for what, seen, traced in compared
            if seen - traced > TOLERANCE * seen
        ]
        if more:
            yield f"{row.name} took over {TOLERANCE:.0%} more than its trace says: {'; '.join(more)}"
        elif shares := [(traced - seen) / seen for _, seen, traced in compared if traced - seen > TOLERANCE * seen > 0]:
            less.append((max(shares), row.name))
    if less:
        share, name = max(less)
        yield (
            f"{len(less)} block(s) took over {TOLERANCE:.0%} less than their traces say, {name} most "
            f"({share:.0%}): a trace also counts for a block what glue and the loss make of its outputs"
        )


def _compared(row: BlockCost, measured: Measurement) -> list[tuple[str, int, int]]:
    """What is compared, in words, with the bytes that were measured and traced."""
    return [
        ("static", measured.static, row.weights + row.buffers),
        ("saved", measured.saved, row.saved),
        ("forward peak", measured.forward_peak - measured.static, row.saved + row.forward_transient),
        (
            "backward peak",
            measured.backward_peak - measured.static,
            max(row.saved, row.gradients) + row.backward_transient,
        ),
    ]
