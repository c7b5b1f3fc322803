"""What a step holds where blocks make what they have saved again before their backward, or have it on the host.

Recomputed blocks do as `torch.utils.checkpoint` without reentry (`torch/utils/checkpoint.py`): the forward leaves only
what the block was given, and what others use of what it made; when its backward first needs a saved tensor, the forward
runs again up to the last tensor that is saved, and what it was given stays until the backward is through. Offloaded
blocks do as `torch.autograd.graph.save_on_cpu`, but bring everything back at once, before the backward.

A checkpoint holds the very list or dictionary that a block was given, with what other blocks have put there by then;
that is not told here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autobalance.profiling.timeline import Timeline
from autobalance.timelines.calls import Call
from autobalance.timelines.insertions import Insertions
from autobalance.timelines.rests import rests_of

WORDS = ("keep", "recompute", "offload")
"""What a block may do with what it saves."""


def with_savings(timeline: Timeline, saving: Sequence[str]) -> Timeline:
    """The storage events of the same steps where some blocks recompute or offload what they save.

    Of several micro-batches each does so: edit the timeline of one before they are interleaved.

    Example:
        >>> less = with_savings(profile.timeline, ["keep", "recompute", "recompute", "keep"])
        >>> replay(less, [0, 0, 1, 1], root=1, devices=2)

    Args:
        timeline: of steps with one micro-batch, with every block apart.
        saving: "keep", "recompute" or "offload" for each block.

    Returns:
        A timeline whose storages are those of the given one, then those that are made again.

    Raises:
        ValueError: an unknown word, or a block of which the trace does not know what its backward uses.
    """
    unknown = [word for word in saving if word not in WORDS]
    if unknown:
        raise ValueError(f"saving has {unknown[0]!r}; choose among {', '.join(map(repr, WORDS))}")
    known = savable(timeline)
    blind = [block for block, word in enumerate(saving) if word != "keep" and block not in known]
    if blind:
        raise ValueError(
            f"block {blind[0]} is to {saving[blind[0]]} what it saves, but the trace has no forward of it whose "
            f"backward uses anything: keep it"
        )
    chosen = [call for call in timeline.calls if saving[call.block] != "keep"]
    if not chosen:
        return timeline
    editing = _Savings(timeline)
    editing.recompute([call for call in chosen if saving[call.block] == "recompute"])
    editing.offload([call for call in chosen if saving[call.block] == "offload"])
    return editing.finished()


def savable(timeline: Timeline) -> frozenset[int]:
    """Blocks of which it is known what their backwards use, so that they can recompute or offload it.

    Example:
        >>> savable(Profile.from_costs([4, 4], [1, 1]).timeline)
        frozenset({0, 1})

    Args:
        timeline: of a trace.
    """
    return frozenset(call.block for call in timeline.calls)


class _Savings:
    """The edit of one timeline, call by call."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._edit = Insertions(timeline)
        self._births, self._deaths = (moments.tolist() for moments in timeline.lives)
        self._given = {arrival.given for fan in timeline.fans for arrival in fan.arrivals}
        self._first_again: dict[int, int] = {}  # by event at which a call comes back, what is born first then
        self._stays: dict[int, int] = {}  # by input, how many events there are by when it may die
        self._let_go_of: set[int] = set()

    def recompute(self, calls: Sequence[Call]) -> None:
        """Let calls make their saved storages again."""
        again = [call for call in calls if call.saved or _casts_of(call)]
        for call in again:
            for storage in call.inputs:
                self._stays[storage] = max(self._through(call), self._stays.get(storage, 0))
        for call in again:
            self._recompute(call)

    def _recompute(self, call: Call) -> None:
        # The forward is run again up to the last storage that is saved.
        last = max((self._births[storage] for storage in call.saved), default=call.start - 1)
        again = self._again(call, last)
        rerun: list[int] = []
        storages, born = self._timeline.event_columns
        kept = list(call.kept)
        alive: dict[int, None] = {}
        for position in range(call.start, last + 1):
            storage = int(storages[position])
            if storage not in again:
                continue
            if storage in call.saved:
                rerun += [-(each + 1) for each in kept]
                kept = []
            if born[position]:
                alive[storage] = None
                rerun.append(again[storage] + 1)
            elif storage in alive:
                del alive[storage]
                rerun.append(-(again[storage] + 1))
        rerun += [-(again[storage] + 1) for storage in alive if storage not in call.saved]
        casts = [self._edit.add(storage) for storage in _casts_of(call)]
        self._come_back(call, [*(storage + 1 for storage in casts), *rerun])
        self._edit.before(self._through(call), *(-(storage + 1) for storage in casts))
        self._let_go(call, again)
        self._edit.before(call.stop, *(storage + 1 for storage in call.kept))

    def offload(self, calls: Sequence[Call]) -> None:
        """Let calls have their saved storages, and what they were given, on the host between forward and backward."""
        for rest in rests_of(self._timeline, calls):
            those, storage = rest.brought_back, rest.storage
            if not those:
                continue
            # Others find it on the device, and hold it until they are through.
            held = [min(self._through(call), those[0].back) for call in rest.calls[: -len(those)]]
            self._edit.before(max([rest.gone, *held]), -(storage + 1))
            for call, following in zip(those, [*those[1:], None], strict=True):
                back = self._bring_back(call, storage)
                if following is None:
                    self._edit.replace(self._deaths[storage], -(back + 1))
                else:
                    self._edit.before(min(self._through(call), following.back), -(back + 1))

    def _bring_back(self, call: Call, storage: int) -> int:
        """A storage that is there from a call's backward on."""
        if storage in self._given:  # as one and the same, which others may share
            self._edit.back(call.back, storage + 1)
            return storage
        copy = self._edit.add(storage)
        self._come_back(call, [copy + 1])
        return copy

    def finished(self) -> Timeline:
        """The changed timeline."""
        for storage, until in self._stays.items():
            if self._deaths[storage] < until and storage not in self._let_go_of:
                self._edit.leave_out(self._deaths[storage])
                self._edit.before(until, -(storage + 1))
        old = self._timeline
        births = self._births
        gradients = tuple(
            (gradient, self._first_again.get(births[then], then) if then >= 0 else then)
            for gradient, then in old.gradients
        )
        return replace(self._edit.finished(), gradients=gradients, calls=())

    def _again(self, call: Call, last: int) -> dict[int, int]:
        """New storages for what the forward makes up to an event, by what they are like; workspaces stay for ever."""
        storages, born = self._timeline.event_columns
        here = np.arange(call.start, last + 1)
        owners = self._timeline.owner_column[storages[here]]
        made = storages[here[born[here] & (owners == call.block)]]
        never = len(self._timeline.events)
        return {
            storage: self._edit.add(storage)
            for storage in dict.fromkeys([*made.tolist(), *call.saved])
            if self._deaths[storage] < never
        }

    def _come_back(self, call: Call, events: list[int]) -> None:
        self._edit.back(call.back, *events)
        first = next((event - 1 for event in events if event > 0), None)
        if first is not None:
            self._first_again.setdefault(call.back, first)

    def _let_go(self, call: Call, again: dict[int, int]) -> None:
        """Let saved storages die when nothing but the backward needs them, and those made again in their place."""
        never = len(self._timeline.events)
        for storage, until in zip(call.saved, call.until, strict=True):
            death = self._deaths[storage]
            if storage not in again or death >= never:
                continue
            until = max(until, call.stop, self._stays.get(storage, 0))
            if until <= call.back:
                self._let_go_of.add(storage)
                self._edit.before(until, -(storage + 1))
                self._edit.replace(death, -(again[storage] + 1))
            else:  # others use it as well: the block has one of its own
                self._edit.before(death + 1, -(again[storage] + 1))

    def _through(self, call: Call) -> int:
        """How many events there are by when a call's backward holds nothing any more."""
        never = len(self._timeline.events)
        deaths: list[int] = [self._deaths[storage] for storage in call.saved]
        return max([call.back, call.through, *(death + 1 for death in deaths if death < never)])


def _casts_of(call: Call) -> list[int]:
    """Casts of weights that another call has made, and that its own forward makes where it runs again."""
    return [storage for storage in call.borrowed if storage not in call.inputs]
