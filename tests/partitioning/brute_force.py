"""An independent judge of plans: small questions in plain numbers, a walk through a step, and a look at every plan.

It shares nothing with the planner: no timeline, no tables, no search. What it knows is the model in words. A stage is
what one visit of a micro-batch to a device runs. A block's forward takes its transient bytes up and down and keeps its
saved bytes; its backward, in reverse order of blocks, takes its transient bytes up and down and frees what was saved.
A recomputed block keeps of what it saves its input alone, and its backward first runs the forward again. An offloaded
block's saved bytes leave after its forward and come back before its backward. Static bytes are there from the start; of
blocks whose weights stream from the host, those of two in turn, which cross twice for each micro-batch.

A stage saves memory only where it would not fit otherwise, in the way that takes the least time, and then counts as one
that fills its device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations, product

# Plans within 2 % of the least step time compete by their largest use.
NEAR = 1.02
# A pinned block leaves the call order only where that betters a plan by more than 5 %.
PRICE_OF_DISORDER = 0.05
EPSILON = 1e-9

Key = tuple[float, ...]
# A launch on one device: which of the device's visits, and whether it is a backward.
Launch = tuple[int, bool]


@dataclass(frozen=True)
class Machine:
    """A device: bytes, seconds per second of the fastest, bytes per second, and where it stands."""

    budget: int
    slowness: float = 1.0
    link: float = 50.0
    node: int = 0
    network: float = 50.0
    host_link: float = 50.0


@dataclass(frozen=True)
class Question:
    """What is asked: a chain of blocks whose costs are for a whole batch, machines, and what is allowed.

    Attributes:
        static, saved, transient, transfer: bytes of each block.
        forward, backward: seconds of each block on the fastest machine.
        machines: to split over.
        policy: `"auto"`, `"balanced"`, `"balanced_low_0"` or `"sequential"`.
        samples: in the batch.
        micro_batches, schedules: which of them may be chosen.
        savings: what a block may do: `"keep"`, `"recompute"` or `"offload"` what it saves, each also with `"+stream"`.
        group: blocks that share a device.
        pins: block -> machine.
    """

    static: tuple[int, ...]
    saved: tuple[int, ...]
    transient: tuple[int, ...]
    transfer: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    machines: tuple[Machine, ...]
    policy: str = "balanced"
    samples: int = 1
    micro_batches: tuple[int, ...] = (1,)
    schedules: tuple[str, ...] = ("naive",)
    savings: tuple[str, ...] = ("keep",)
    group: tuple[int, ...] = ()
    pins: Mapping[int, int] = field(default_factory=dict, hash=False)

    @property
    def blocks(self) -> range:
        """Indices of the blocks."""
        return range(len(self.static))

    def share(self, whole: float, micro_batches: int) -> float:
        """Of what a whole batch takes, what the largest of its parts takes."""
        return whole * -(-self.samples // micro_batches) / self.samples


@dataclass(frozen=True)
class Visit:
    """Consecutive blocks that a micro-batch runs through on one device, and where it came from (None: the batch)."""

    blocks: tuple[int, ...]
    device: int
    source: int | None


@dataclass(frozen=True)
class Outcome:
    """What a plan comes to."""

    assignment: tuple[int, ...]
    saving: tuple[str, ...]
    micro_batches: int
    schedule: str
    peaks: tuple[int, ...]
    uses: tuple[float, ...]
    stage_times: tuple[float, ...]

    @property
    def ranks(self) -> tuple[float, ...]:
        """Uses as policies compare them: a device on which a block saves memory counts as full."""
        saving = {at for at, word in zip(self.assignment, self.saving, strict=True) if word != "keep"}
        return tuple(1.0 if device in saving else use for device, use in enumerate(self.uses))

    @property
    def step_time(self) -> float:
        """Seconds: the first micro-batch runs through all stages, each other one follows at the pace of the longest."""
        return sum(self.stage_times) + (self.micro_batches - 1) * max(self.stage_times)


def visits_of(assignment: Sequence[int]) -> list[Visit]:
    """The stages of an assignment.

    Example:
        >>> [visit.blocks for visit in visits_of([1, 1, 0])]
        [(0, 1), (2,)]
    """
    visits: list[Visit] = []
    start = 0
    for block in range(1, len(assignment) + 1):
        if block == len(assignment) or assignment[block] != assignment[start]:
            source = assignment[start - 1] if start else None
            visits.append(Visit(tuple(range(start, block)), assignment[start], source))
            start = block
    return visits


def launches(schedule: str, visits: Sequence[Visit], device: int, micro_batches: int) -> tuple[Launch, ...]:
    """Forwards and backwards in the order in which a device takes them.

    Example:
        >>> launches("1f1b", visits_of([0, 1]), 0, 3)
        ((0, False), (0, False), (0, True), (0, False), (0, True), (0, True))
    """
    forwards = [(number, False) for number in range(len(visits))]
    backwards = [(number, True) for number in reversed(range(len(visits)))]
    if schedule == "1f1b":
        order = list(_in_turns(len(visits), micro_batches))
    else:
        parts = {"naive": 1, "gpipe": micro_batches}[schedule]
        order = [*forwards * parts, *backwards * parts]
    return tuple(launch for launch in order if visits[launch[0]].device == device)


def _in_turns(stages: int, micro_batches: int) -> Iterator[Launch]:
    """As one micro-batch begins, those before it go one stage further; the one at the end goes all the way back."""
    under_way: list[int] = []
    left = micro_batches
    while left or under_way:
        under_way = [stage + 1 for stage in under_way] + [0] * bool(left)
        left -= bool(left)
        yield from ((stage, False) for stage in under_way)
        if under_way[0] == stages - 1:
            under_way.pop(0)
            yield from ((stage, True) for stage in reversed(range(stages)))


def memory(
    question: Question,
    blocks: Mapping[int, tuple[int, ...]],
    order: Sequence[Launch],
    saving: Mapping[int, str],
    micro_batches: int,
) -> int:
    """Most bytes at once on a device, by a walk through its launches.

    Args:
        question: has the sizes.
        blocks: of every visit to the device.
        order: its launches.
        saving: what becomes of the saved bytes of each of its blocks.
        micro_batches: parts of the batch.
    """
    members = [block for stage in blocks.values() for block in stage]
    streamed = [question.static[block] for block in members if saving[block].endswith("+stream")]
    held = peak = sum(question.static[block] for block in members) - sum(streamed)
    held += max((here + after for here, after in zip(streamed, [*streamed[1:], 0], strict=False)), default=0)

    def change(size: float) -> None:
        nonlocal held, peak
        held += round(size)
        peak = max(peak, held)

    change(0)
    for visit, is_backward in order:
        for block in reversed(blocks[visit]) if is_backward else blocks[visit]:
            saved = question.share(question.saved[block], micro_batches)
            work = question.share(question.transient[block], micro_batches)
            given = question.share(question.transfer[block - 1] if block else 0, micro_batches)
            how = saving[block].removesuffix("+stream")
            change(work)
            change(-work)
            if not is_backward:
                change(given if how == "recompute" else saved)
                change(-saved if how == "offload" else 0)
                continue
            if how == "recompute":
                change(saved - given)
                change(work)
                change(-work)
            elif how == "offload":
                change(saved)
                change(work)
                change(-work)
            change(-saved)
    return peak


def stage_time(question: Question, visit: Visit, saving: Mapping[int, str], micro_batches: int) -> float:
    """Seconds of a micro-batch in a stage: its work there and back, what is made again, and what comes in."""
    machine = question.machines[visit.device]
    fastest = min(each.slowness for each in question.machines)
    work = sum(question.forward[block] + question.backward[block] for block in visit.blocks)
    work += sum(question.forward[block] for block in visit.blocks if saving[block].startswith("recompute"))
    seconds = question.share(work * machine.slowness / fastest, micro_batches)
    if visit.source is not None:
        # The input comes, and its gradient goes back over the same link.
        both_ways = 2 * question.share(question.transfer[visit.blocks[0] - 1], micro_batches)
        seconds += both_ways / link(machine, question.machines[visit.source])
    moved = sum(
        question.share(question.saved[block] if saving[block].startswith("offload") else 0, micro_batches)
        + (question.static[block] if saving[block].endswith("+stream") else 0)
        for block in visit.blocks
    )
    return max(seconds, 2 * moved / machine.host_link)


def link(one: Machine, other: Machine) -> float:
    """Bytes per second between two machines."""
    if one.node != other.node:
        return min(one.network, other.network)
    return min(one.link, other.link)


def outcome(
    question: Question, assignment: Sequence[int], saving: Sequence[str], micro_batches: int, schedule: str
) -> Outcome:
    """What a plan comes to, by the walk and the formula.

    Example:
        >>> outcome(question, plan.assignment, plan.saving, plan.micro_batches, plan.schedule).peaks
    """
    visits = visits_of(assignment)
    kept = dict(enumerate(saving or ["keep"] * len(assignment)))
    peaks = []
    for device in range(len(question.machines)):
        here = {number: visit.blocks for number, visit in enumerate(visits) if visit.device == device}
        order = launches(schedule, visits, device, micro_batches)
        peaks.append(memory(question, here, order, kept, micro_batches) if here else 0)
    return Outcome(
        tuple(assignment),
        tuple(kept.values()),
        micro_batches,
        schedule,
        tuple(peaks),
        tuple(peak / machine.budget for peak, machine in zip(peaks, question.machines, strict=True)),
        tuple(stage_time(question, visit, kept, micro_batches) for visit in visits),
    )


@dataclass(frozen=True)
class Best:
    """The best of all plans.

    Attributes:
        keys: what the policy compares; several where one that is not quite the least is as good.
        least_times: the least step times of all plans that fit, for each of these.
    """

    keys: tuple[Key, ...]
    least_times: tuple[float, ...]


def key_of(question: Question, found: Outcome) -> Key:
    """What the policy compares; of two plans the one with the smaller key is better.

    `"auto"` compares uses among plans of nearly the least step time alone, which `best` sees to.
    """
    if question.policy == "balanced_low_0":
        return (found.ranks[0], max(found.ranks[1:], default=0.0))
    if question.policy == "sequential":
        used = len(set(found.assignment))
        if question.group or question.pins or len(question.schedules) > 1:
            return (used,)  # what fills a device first is then no longer a matter of the order alone
        return (used, *(-found.assignment.count(device) for device in range(len(question.machines))))
    return (max(found.ranks),)


def best(question: Question) -> Best | None:
    """The best plan of a question, by a look at every plan; None: nothing fits.

    Pinned blocks keep their place in the call order unless that costs more than 5 % of what is compared first.
    """
    in_order = _best_of(question, frozenset())
    pinned = frozenset(question.pins)
    if not pinned:
        return in_order
    anywhere = _best_of(question, pinned)
    if in_order is None or anywhere is None:
        return in_order or anywhere
    compared = [each.least_times[0] if question.policy == "auto" else each.keys[0][0] for each in (anywhere, in_order)]
    if compared[0] < (1 - PRICE_OF_DISORDER) * compared[1]:
        return anywhere
    return Best(in_order.keys + anywhere.keys, in_order.least_times + anywhere.least_times)


def _best_of(question: Question, movable: frozenset[int]) -> Best | None:
    found = list(_outcomes(question, movable))
    if not found:
        return None
    least = min(each.step_time for each in found)
    if question.policy == "auto":
        found = [each for each in found if each.step_time <= NEAR * least * (1 + EPSILON)]
    return Best((min(key_of(question, each) for each in found),), (least,))


def _outcomes(question: Question, movable: frozenset[int]) -> Iterator[Outcome]:
    """Every plan that fits, with the quickest way to save memory on each device that has to."""
    ways = [
        (micro_batches, schedule)
        for micro_batches, schedule in product(question.micro_batches, question.schedules)
        if (micro_batches == 1) == (schedule == "naive")
    ]
    options = _Options(question)
    for assignment in assignments(question, movable):
        visits = visits_of(assignment)
        devices = sorted(set(assignment))
        for micro_batches, schedule in ways:
            chosen = [options.of(visits, device, micro_batches, schedule) for device in devices]
            if None in chosen:
                continue
            peaks = dict.fromkeys(range(len(question.machines)), 0)
            times: dict[int, float] = {}
            saving: dict[int, str] = {}
            for device, option in zip(devices, chosen, strict=True):
                assert option is not None
                peaks[device] = option.peak
                here = (number for number, visit in enumerate(visits) if visit.device == device)
                times.update(zip(here, option.times, strict=True))
                saving.update(option.saving)
            yield Outcome(
                assignment,
                tuple(saving[block] for block in question.blocks),
                micro_batches,
                schedule,
                tuple(peaks.values()),
                tuple(peaks[at] / machine.budget for at, machine in enumerate(question.machines)),
                tuple(times[number] for number in range(len(visits))),
            )


def assignments(question: Question, movable: frozenset[int]) -> Iterator[tuple[int, ...]]:
    """Every assignment that keeps the call order, but for far-apart blocks of the group and movable ones."""
    group = question.group
    is_far = bool(group) and max(group) - min(group) >= len(group)
    apart = movable | (frozenset(group) if is_far or movable & set(group) else frozenset())
    chain = [block for block in question.blocks if block not in apart]
    devices = range(len(question.machines))
    free = question.policy != "sequential"
    for stages in range(min(len(chain), 1), min(len(chain), len(devices)) + 1):
        orders = permutations(devices, stages) if free else combinations(devices, stages)
        for order, cuts in product(list(orders), list(combinations(range(1, len(chain)), max(0, stages - 1)))):
            bounds = (0, *cuts, len(chain))
            device_of = {
                block: device
                for device, start, stop in zip(order, bounds, bounds[1:], strict=False)
                for block in chain[start:stop]
            }
            for places in product(devices, repeat=len(apart)):
                device_of.update(zip(sorted(apart), places, strict=True))
                together = len({device_of[block] for block in group}) <= 1
                if together and all(device_of[block] == device for block, device in question.pins.items()):
                    yield tuple(device_of[block] for block in question.blocks)


@dataclass(frozen=True)
class _Option:
    """What is done on a device: its peak, the time of each of its stages, what its blocks do."""

    peak: int
    times: tuple[float, ...]
    saving: tuple[tuple[int, str], ...]


class _Options:
    """For every device and what it runs: all blocks keep what they save, or else the quickest way to fit."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._peaks: dict[object, int] = {}
        self._found: dict[object, _Option | None] = {}

    def of(self, visits: Sequence[Visit], device: int, micro_batches: int, schedule: str) -> _Option | None:
        order = launches(schedule, visits, device, micro_batches)
        here = {number: visit for number, visit in enumerate(visits) if visit.device == device}
        known = (device, tuple(here.values()), order, micro_batches)
        if known not in self._found:
            self._found[known] = self._quickest(here, order, micro_batches, self._question.machines[device].budget)
        return self._found[known]

    def _quickest(
        self, here: Mapping[int, Visit], order: tuple[Launch, ...], micro_batches: int, budget: int
    ) -> _Option | None:
        question = self._question
        blocks = {number: visit.blocks for number, visit in here.items()}
        members = [block for stage in blocks.values() for block in stage]
        best: _Option | None = None
        for ways in product(question.savings, repeat=len(members)):
            saving = dict(zip(members, ways, strict=True))
            same = (tuple(blocks.items()), order, ways, micro_batches)
            if same not in self._peaks:
                self._peaks[same] = memory(question, blocks, order, saving, micro_batches)
            if self._peaks[same] > budget:
                continue
            times = tuple(stage_time(question, visit, saving, micro_batches) for visit in here.values())
            if best is None or sum(times) < sum(best.times):
                best = _Option(self._peaks[same], times, tuple(saving.items()))
            if all(way == "keep" for way in ways):
                break
        return best
