"""Which blocks of a fan share a copy of its tensor under an assignment."""

from __future__ import annotations

from autobalance.profiling.timeline import Timeline, Whole
from autobalance.timelines.fans import NOBODY, Arrival, Fan


def is_at_home(arrival: Arrival, homes: Whole) -> bool:
    """Whether a gradient of a copy is made where the tensor was.

    Args:
        arrival: of a gradient.
        homes: device of each account.
    """
    return arrival.given != NOBODY and bool(homes[arrival.given] == homes[arrival.brought])


def any_joins_at_home(fan: Fan, homes: Whole) -> bool:
    """Whether a gradient that is made where the tensor was can be added before the trace has added it.

    Args:
        fan: a tensor with several gradients.
        homes: device of each account.
    """
    return any(is_at_home(arrival, homes) for arrival in fan.arrivals[1:])


def groups_of(timeline: Timeline, fan: Fan, homes: Whole) -> dict[int, list[int]]:
    """Arrivals that share a copy of the tensor on another device, by each of them, in the order of the arrivals.

    Args:
        timeline: of a trace.
        fan: a tensor with several gradients.
        homes: device of each account.
    """
    births, deaths = timeline.lives
    sharing: list[tuple[int, int, list[int]]] = []  # device, last death of what holds the copy, arrivals
    copies = [
        number
        for number, arrival in enumerate(fan.arrivals)
        if arrival.given != NOBODY and 0 <= homes[arrival.given] != homes[arrival.brought]
    ]
    for number in sorted(copies, key=lambda number: int(births[fan.arrivals[number].given])):
        given = fan.arrivals[number].given
        device, until = int(homes[given]), int(deaths[given])
        for at, (where, last, members) in enumerate(sharing):
            if where == device and births[given] < last:
                sharing[at] = device, max(last, until), [*members, number]
                break
        else:
            sharing.append((device, until, [number]))
    return {number: sorted(members) for _, _, members in sharing if len(members) > 1 for number in members}
