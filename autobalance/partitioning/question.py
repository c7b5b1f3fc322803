"""What a plan is asked for, checked and in one piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autobalance.devices.device import Device
from autobalance.partitioning.savings.saver import Allowed
from autobalance.profiling.profile import Profile
from autobalance.schedules.launches import SCHEDULES

# More micro-batches than that for each device gain little: the bubble is below an eighth.
_MOST_PER_DEVICE = 8


@dataclass(frozen=True)
class Question:
    """Everything that a plan depends on.

    Attributes:
        profile: of the whole batch.
        devices: in the given order.
        budgets: bytes per device.
        policy: its name.
        pins: (block index or `ROOT`, device).
        excess: bytes by which each device is known to stand above the replay.
        schedules: that may be chosen.
        micro_batches: that may be chosen; empty: any.
        recompute: whether blocks may recompute what they save; None: where memory asks for it.
        offload: whether host memory may be used.
        host_memory: bytes of it.
        solver: whether a solver may be asked to prove how stages save memory.
        accumulated: whether micro-batches are whole batches, of which a step adds up the gradients.
    """

    profile: Profile
    devices: tuple[Device, ...]
    budgets: tuple[int, ...]
    policy: str
    pins: tuple[tuple[int, int], ...] = ()
    excess: tuple[int, ...] = ()
    schedules: tuple[str, ...] = SCHEDULES
    micro_batches: tuple[int, ...] = ()
    recompute: bool | None = False
    offload: bool = False
    host_memory: int = 0
    solver: bool = True
    accumulated: bool = False

    @property
    def allowed(self) -> Allowed | None:
        """What blocks may do to save memory; None: nothing."""
        recompute = self.recompute is not False
        return Allowed(recompute, self.offload, self.host_memory, self.solver) if recompute or self.offload else None

    @property
    def is_timed(self) -> bool:
        """Whether plans are compared by how long a step takes, not by memory alone."""
        return self.policy == "auto" and any(block.forward_time for block in self.profile.blocks)

    @property
    def without_recomputing(self) -> Question:
        """The question whose blocks recompute only where they are told to, not where they may."""
        return replace(self, recompute=False) if self.recompute is None else self

    @property
    def rounds(self) -> Iterator[tuple[Question, list[tuple[str, int]]]]:
        """Questions, each with schedules and numbers of micro-batches; one is asked where none before has an answer."""
        splits = list(self.splits)
        if not self.is_timed:
            # More parts and more recomputation take less memory: who knows no time would take the most there are.
            keeping = self.without_recomputing
            whole = 1 if self.schedules == SCHEDULES and not self.micro_batches else len(splits)
            yield keeping, splits[:whole]
            yield keeping, splits[whole:]
            splits = [] if keeping is self else splits
        yield self, splits
        for finer in self.finer_splits:
            yield self, finer

    @property
    def splits(self) -> Iterator[tuple[str, int]]:
        """Schedules with numbers of micro-batches, the simplest first.

        A batch of one knows one way. Of the numbers that make parts of one size, the least is enough.
        """
        if "naive" in self.schedules and 1 in (self.micro_batches or (1,)):
            yield "naive", 1
        others = [schedule for schedule in self.schedules if schedule != "naive"]
        for schedule in others:
            for count in self.micro_batches or self._useful_counts:
                if count > 1 or "naive" not in self.schedules:
                    yield schedule, count

    @property
    def finer_splits(self) -> Iterator[list[tuple[str, int]]]:
        """Schedules with more parts than gain time, about twice as many each time: each of less memory.

        Only where any number may be chosen.
        """
        batch = self._divisible
        others = [schedule for schedule in self.schedules if schedule != "naive"]
        size = -(-batch // self._most_useful) if batch and others and not self.micro_batches else 0
        while size > 1:
            size //= 2
            yield [(schedule, -(-batch // size)) for schedule in others]

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `plan` that ask the same of a profile of another batch."""
        names = {owner: name for name, owner in self.profile.loose} | dict(enumerate(self.profile.names))
        return {
            "devices": self.devices,
            "policy": self.policy,
            "micro_batches": self.micro_batches or "auto",
            "schedule": self.schedules,
            "max_memory": {**dict(enumerate(self.budgets)), **({"cpu": self.host_memory} if self.offload else {})},
            "reserve": 0,
            "pin": {names[owner]: device for owner, device in self.pins},
            "recompute": "auto" if self.recompute is None else self.recompute,
            "offload": self.offload,
            "excess": self.excess,
            "accumulated": self.accumulated,
        }

    @property
    def _divisible(self) -> int:
        """Samples of which it is known what each takes."""
        return self.profile.batch_size if self.profile.is_scalable else 0

    @property
    def _most_useful(self) -> int:
        return min(self._divisible, _MOST_PER_DEVICE * len(self.devices))

    @property
    def _useful_counts(self) -> list[int]:
        batch = self._divisible
        sizes = {-(-batch // count) for count in range(1, self._most_useful + 1)} if batch else {0}
        return sorted({-(-batch // size) if size else 1 for size in sizes})


def schedules_in(schedule: str | Sequence[str]) -> tuple[str, ...]:
    """The schedules that a user's word or words allow.

    Example:
        >>> schedules_in("1f1b")
        ('1f1b',)

    Args:
        schedule: as for `plan`.

    Raises:
        ValueError: a schedule that does not exist.
    """
    if schedule == "auto":
        return SCHEDULES
    wanted = tuple(schedule) if isinstance(schedule, Iterable) and not isinstance(schedule, str) else (schedule,)
    unknown = [word for word in wanted if word not in SCHEDULES]
    if unknown or not wanted:
        raise ValueError(
            f"schedule={schedule!r} does not exist; choose 'auto', one of {', '.join(map(repr, SCHEDULES))}, or "
            f"several of these to choose among"
        )
    return wanted


def counts_in(micro_batches: int | str | Sequence[int], schedules: Sequence[str], batch_size: int) -> tuple[int, ...]:
    """The numbers of micro-batches that a user allows; empty for any.

    Example:
        >>> counts_in("auto", ["1f1b"], batch_size=32)
        ()

    Args:
        micro_batches: as for `plan`.
        schedules: that may be chosen.
        batch_size: samples that are split; 0: not known, or micro-batches are whole batches.

    Raises:
        ValueError: a number that no batch can be split into, or more than one for a schedule that takes batches whole.
    """
    if micro_batches == "auto":
        return ()
    wanted: tuple[Any, ...] = (micro_batches,)
    if isinstance(micro_batches, Iterable) and not isinstance(micro_batches, str):
        wanted = tuple(micro_batches)
    if not all(type(count) is int and count > 0 for count in wanted) or not wanted:
        raise ValueError(
            f"micro_batches={micro_batches!r} does not exist; choose 'auto', a number of parts from 1 on, or several "
            f"of these to choose among"
        )
    most = max(wanted)
    if tuple(schedules) == ("naive",) and max(wanted) > 1:
        raise ValueError(
            f"micro_batches={micro_batches!r} needs a schedule that splits batches: choose schedule='1f1b' or 'gpipe'; "
            f"the naive one takes a batch as a whole"
        )
    if most > 1 and batch_size and most > batch_size:
        raise ValueError(f"micro_batches={micro_batches!r}: a batch of {batch_size} samples has no {most} parts")
    return tuple(sorted(set(wanted)))
