"""What weights that stream take on the device while they pass through it, at least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autobalance.partitioning.savings.saving_options import Option
from autobalance.partitioning.savings.saving_ways import OneWay


def least_staging(options: Sequence[Sequence[Option]], in_flight: int, room: float) -> float:
    """Bytes that any way which fits stages at least, for two neighbours among the blocks that stream.

    Of more large blocks than there are smaller ones to part them, two are neighbours.

    Example:
        >>> least_staging(all_options, in_flight=4, room=2**33)

    Args:
        options: of every block of a stage, the one in which all streams last.
        in_flight: micro-batches.
        room: bytes beside what stays.
    """
    streaming = sorted((option.staged, option.leaves) for each in options for option in each[-1:] if option.streams)
    if not streaming:
        return 0.0
    staying = [[option for option in each if not option.streams] for each in options]
    lightest = [
        replace(each[0], rests=min(way.rests for way in each), runs=min(way.runs for way in each)) for each in staying
    ]
    short = OneWay(lightest, in_flight).taken() - room
    if short <= 0:
        return 0.0
    found, smaller, largest = 0.0, 0.0, max(leaves for _, leaves in streaming)
    for before, (staged, leaves) in enumerate(streaming):
        if largest * (before + 1) < short + found - smaller:  # at least two more than there are smaller ones
            found = max(found, 2 * staged)
        smaller += leaves
    return found
