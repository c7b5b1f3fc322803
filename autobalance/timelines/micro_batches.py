"""The storage events of steps that take several micro-batches, from those of one micro-batch.

What a block holds at rest, between its forward and its backward, are its storages that are born in the forward and die
in the backward: of `roles_of` those with `Role.OWN`, once for each micro-batch in flight, and those with `Role.CAST`,
once for all. Where backwards begin while forwards go on, gradients of weights' casts come on top, half the bytes of
such weights: they wait for the end of a backward.

- A storage that is born and dies within one forward and backward exists once for each micro-batch.
- A gradient of a parameter is made by the first backward. Later ones make theirs, add it in place and drop it, where
  autograd does so: as soon as the operation that made it has let go of what it used.
- Weights, buffers, optimizer state, workspaces and what the first forward keeps for good exist once.
- Autocast's casts of weights belong to each micro-batch where one follows the other, as each has a context of its own.
  Where they overlap, the first forward makes them for all, in one context that ends with the last forward; the
  gradients of weights then wait for those of all casts, as autograd takes first what was made last.
- Where micro-batches follow one another, each is a batch of its own, as in gradient accumulation: it takes the place of
  the one before it on the root device, and its loss, and what else a forward leaves until the next step's, replaces
  that of the one before. Where they overlap, and without backwards, they are parts of one batch, which is there as a
  whole, and whose results are all kept until the step's would be dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autobalance.profiling.timeline import Timeline, Whole
from autobalance.schedules.launches import Launch
from autobalance.timelines.copies import Copies, leaders_of, taken_in_turn
from autobalance.timelines.fans import NOBODY, Arrival, Fan
from autobalance.timelines.launched import Launched, Manner, launched_of
from autobalance.timelines.passes import parts_of
from autobalance.timelines.script import Script, When, script_of


def interleaved(
    timeline: Timeline, blocks: int, stages: Sequence[tuple[int, int]], order: Sequence[Launch]
) -> Timeline:
    """The storage events of steps with several micro-batches, in launch order.

    Example:
        >>> timeline = profile.scaled(4).timeline                            # one micro-batch of four samples
        >>> many = interleaved(timeline, 8, [(0, 4), (4, 8)], launch_order("1f1b", 2, 8))
        >>> replay(many, [0] * 4 + [1] * 4, root=1, devices=2)

    Args:
        timeline: of steps with one micro-batch, with every block apart.
        blocks: how many there are.
        stages: first block, and one past the last, of every stage, in call order.
        order: launches of one step.

    Returns:
        A timeline whose storages are those of the given one, then copies for further micro-batches.

    Raises:
        ValueError: stages that are not all blocks in order, launches that do not fit them, or marks that do not say
            where forwards and backwards are.
    """
    return MicroBatches(timeline, blocks).interleaved(stages, order)


def with_launches_marked(
    timeline: Timeline, blocks: int, stages: Sequence[tuple[int, int]], order: Sequence[Launch]
) -> Timeline:
    """The same, with a mark where each launch of every step begins, and an unnamed one where the last of a step ends.

    Example:
        >>> with_launches_marked(timeline, 8, [(0, 8)], launch_order("gpipe", 1, 2)).marks[0]
        ('forward 0', 96)

    Args:
        timeline, blocks, stages, order: as for `interleaved`; of two micro-batches or more.
    """
    launched = launched_of(order, stages, blocks)
    script = script_of(timeline, launched.training, launched.manner, launched.count)
    names = [f"{'backward' if launch.backward else 'forward'} {launch.micro_batch}" for launch in order]
    interleaving = _Interleaving(timeline, script, stages, launched)
    return replace(interleaving.timeline(), marks=interleaving.launch_marks(names))


class MicroBatches:
    """Interleaves micro-batches of one timeline, again and again: what does not depend on stages is found once.

    Example:
        >>> many = MicroBatches(profile.timeline, blocks=8)
        >>> two, three = (many.interleaved(stages, order) for stages, order in candidates)

    Args:
        timeline: of steps with one micro-batch, with every block apart.
        blocks: how many there are.
    """

    def __init__(self, timeline: Timeline, blocks: int) -> None:
        self._timeline = timeline
        self._blocks = blocks
        self._scripts: dict[tuple[bool, Manner, int], Script] = {}

    def interleaved(self, stages: Sequence[tuple[int, int]], order: Sequence[Launch]) -> Timeline:
        """As the function of that name.

        Args:
            stages: first block, and one past the last, of every stage, in call order.
            order: launches of one step.
        """
        launched = launched_of(order, stages, self._blocks)
        if launched.count == 1:
            return self._timeline
        key = launched.training, launched.manner, launched.count
        if key not in self._scripts:
            self._scripts[key] = script_of(self._timeline, *key)
        return _Interleaving(self._timeline, self._scripts[key], stages, launched).timeline()


class _Interleaving:
    """One interleaving: launches play the parts of a script, one after the other.

    Args:
        timeline: of one micro-batch.
        script: what each micro-batch does.
        stages: first block, and one past the last, of every stage.
        launched: launches of one step.
    """

    def __init__(
        self, timeline: Timeline, script: Script, stages: Sequence[tuple[int, int]], launched: Launched
    ) -> None:
        self._timeline, self._script, self._launched = timeline, script, launched
        sizes = np.array([stop - start for start, stop in stages])
        self._copies = Copies(timeline, script, launched.count, leaders_of(launched, sizes))
        self._bounds = [_joined(*parts_of(timeline, each, stages)) for each in script.passes]
        self._scenes()
        self._play()

    def timeline(self) -> Timeline:
        """The timeline of all micro-batches."""
        old = self._timeline
        return replace(
            old,
            **self._copies.columns(),
            events=tuple(self._events.tolist()),
            marks=tuple(self._marks()),
            emptied=tuple(self._moved(position) for position in old.emptied),
            fans=tuple(self._fans()),
            gradients=(),
            calls=(),
        )

    def launch_marks(self, names: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """Where every launch of each pass begins, and where the last one ends."""
        found: list[tuple[str, int]] = []
        for first in self._first_scene:
            scenes = range(first, first + len(names) + 1)
            places = [int(self._done[self._read[scene]]) for scene in scenes]
            found += zip([*names, ""], places, strict=True)
        return tuple(found)

    def _scenes(self) -> None:
        """First line, one past the last, and micro-batch of everything that is played; between passes one scene."""
        launched, script = self._launched, self._script
        scenes: list[tuple[NDArray[Any], ...]] = []
        end = np.array([0])
        once = np.zeros(1, dtype=np.int64)
        self._first_scene: list[int] = []  # of every pass
        for bounds in self._bounds:
            lines = script.line_of(bounds)
            scenes.append((end, lines[:1], once, once, once == 0, once == 0))
            self._first_scene.append(1 + len(self._first_scene) * (len(launched.parts) + 1))
            starts, stops = lines[:-1][launched.parts], lines[1:][launched.parts]
            leaders = launched.leaders[launched.parts]
            scenes.append((starts, stops, launched.copies, leaders, launched.is_first, launched.is_last))
            end = lines[-1:]
        scenes.append((end, np.array([len(script.keys)]), once, once, once == 0, once == 0))
        columns = [np.concatenate(column) for column in zip(*scenes, strict=True)]
        self._starts, self._stops, self._of, self._leaders, self._is_first, self._is_last = columns

    def _play(self) -> None:
        """Events of all scenes, and how many there are before each line that is read."""
        script = self._script
        lengths = self._stops - self._starts
        self._read = np.cumsum(lengths) - lengths  # lines before each scene
        scene = np.repeat(np.arange(len(lengths)), lengths)
        lines = np.arange(len(scene)) + (self._starts - self._read)[scene]
        when = script.when[lines]
        is_first = self._is_first[scene]
        done = (when == When.ALWAYS) | ((when == When.FIRST) & is_first)
        done |= ((when == When.LATER) & ~is_first) | ((when == When.LAST) & self._is_last[scene])
        self._done = np.concatenate([[0], np.cumsum(done)])
        scene, lines = scene[done], lines[done]
        own, whose = self._of[scene], script.whose[lines]
        copies = np.choose(whose, [script.copies[lines], own, own - 1, taken_in_turn(own, self._leaders[scene])])
        numbers = self._copies.number(script.storages[lines], copies) + 1
        self._events = np.where(script.born[lines], numbers, -numbers)

    def _marks(self) -> list[tuple[str, int]]:
        """Marks of the first micro-batch; of all where one follows the other, as in gradient accumulation."""
        found = []
        for name, position in self._timeline.marks:
            places = self._places(position)
            found += [(name, place) for place in (places if self._launched.manner is Manner.IN_TURN else places[:1])]
        return sorted(found, key=lambda mark: mark[1])

    def _moved(self, position: int) -> int:
        """Where an event is when it is played first."""
        return self._places(position)[0]

    def _places(self, position: int) -> list[int]:
        """Where an event is each time that it is played."""
        line = int(self._script.line_of(np.array(position)))
        playing = np.flatnonzero((self._starts <= line) & (line < self._stops))
        if not len(playing):
            return [len(self._events)]
        return self._done[self._read[playing] + line - self._starts[playing]].tolist()  # type: ignore[no-any-return]

    def _fans(self) -> list[Fan]:
        births = self._timeline.lives[0]
        found = []
        for each, bounds, first in zip(self._script.passes, self._bounds, self._first_scene, strict=True):
            fans = [fan for fan in self._timeline.fans if each.start <= births[fan.arrivals[0].brought] < each.stop]
            if fans:
                found += self._fans_of(fans, bounds, first)
        return found

    def _fans_of(self, fans: Sequence[Fan], bounds: Whole, first: int) -> list[Fan]:
        """The fans of one pass, for each micro-batch."""
        launched, script = self._launched, self._script
        storages = np.array([each for fan in fans for arrival in fan.arrivals for each in arrival.storages])
        moments = np.array(
            [each for fan in fans for arrival in fan.arrivals for each in (arrival.since, arrival.until)]
        )
        places = np.clip(moments - 1, bounds[0], bounds[-1] - 1)
        parts = np.searchsorted(bounds, places, side="right") - 1
        lines = script.own_line_of(places)
        scenes = np.zeros((2 * launched.stages, launched.count), dtype=np.int64)
        scenes[launched.parts, launched.copies] = first + np.arange(len(launched.parts))
        leaders = launched.leaders[-1]
        found = []
        for copy in range(launched.count):
            mine = scenes[parts, copy]
            positions = self._done[self._read[mine] + lines - self._starts[mine] + 1]
            copies = np.where(script.gradients[storages], taken_in_turn(np.array(copy), leaders), copy)
            copies = np.where(script.copied[storages], copies, 0)
            numbers = np.where(storages == NOBODY, NOBODY, self._copies.number(storages, copies))
            found += _filled(fans, numbers.tolist(), np.where(moments > 0, positions, 0).tolist())
        return found


def _joined(forward: Whole, backward: Whole) -> Whole:
    """Bounds of the forward's parts and of the backward's."""
    return np.concatenate([forward[:-1], backward])


def _filled(fans: Sequence[Fan], storages: Sequence[int], moments: Sequence[int]) -> list[Fan]:
    """Fans like others, with the next storages and moments of two lists."""
    numbers, times = iter(storages), iter(moments)
    return [
        Fan(
            tuple(
                Arrival(
                    brought=next(numbers),
                    added=next(numbers),
                    given=next(numbers),
                    terms=tuple(next(numbers) for _ in arrival.terms),
                    sums=tuple(next(numbers) for _ in arrival.sums),
                    since=next(times),
                    until=next(times),
                )
                for arrival in fan.arrivals
            )
        )
        for fan in fans
    ]
