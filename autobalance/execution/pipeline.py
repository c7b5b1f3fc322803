"""Micro-batches through the stages of a plan, launched in the order of its schedule by the user's own forward.

The user's code runs once for each micro-batch. Where the next stage begins, which is where a block of that stage is
called, its thread hands the baton back, and another micro-batch goes on. The graph of autograd is never cut: what skips
stages, is shared or is computed between blocks needs nothing special.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from autobalance import compat
from autobalance.execution.micro_batch import MicroBatch, current_micro_batch, working_on
from autobalance.execution.suspended import Suspended, current_call
from autobalance.placement.contents import tensors_in
from autobalance.placement.ready import mark_gradient_ready, mark_ready
from autobalance.schedules.launches import Launch, launch_order

Forward = Callable[[int], None]
"""Runs the user's step on the micro-batch of this number, up to its loss, and keeps what it returns."""
Backward = Callable[[Sequence[int]], None]
"""Runs one backward of the losses of these micro-batches."""


class Beside(Protocol):
    """What else has to be done at each visit of a block, such as seeding random numbers."""

    def begin(self, micro_batch: MicroBatch) -> None:
        """The user's step begins for a micro-batch, in this thread."""

    def end(self, micro_batch: MicroBatch) -> None:
        """It has returned or failed."""

    def suspend(self, micro_batch: MicroBatch) -> None:
        """The thread of a micro-batch is about to hand the baton back."""

    def resume(self, micro_batch: MicroBatch) -> None:
        """The thread of a micro-batch goes on."""

    def enter(self, block: int, micro_batch: MicroBatch) -> None:
        """A block runs next."""

    def leave(self, block: int, micro_batch: MicroBatch) -> None:
        """It has returned or failed."""

    def enter_again(self, block: int) -> None:
        """A block runs next in a backward, where a checkpoint around it runs it again."""

    def leave_again(self, block: int) -> None:
        """It has returned or failed."""


class Pipeline:
    """Runs steps in micro-batches; it is the visitor that blocks' doors tell of their calls.

    Example:
        >>> pipeline = Pipeline("1f1b", stage_of=[0, 0, 1, 1], devices=[0, 1])
        >>> installed = install(model, blocks, places, locator, visitor=pipeline)      # doctest: +SKIP
        >>> pipeline.train(4, forward, backward)                                       # doctest: +SKIP

    Args:
        schedule: one of `autobalance.schedules.launches.SCHEDULES`.
        stage_of: stage of every block, in call order.
        devices: device index of every stage.
        beside: told of everything as well.
    """

    def __init__(
        self, schedule: str, stage_of: Sequence[int], devices: Sequence[int], beside: Sequence[Beside] = ()
    ) -> None:
        self.schedule = schedule
        self._stage_of = tuple(stage_of)
        self._devices = tuple(devices)
        self._beside = tuple(beside)
        self._runs: dict[Suspended, _Run] = {}

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self._devices)

    def train(self, count: int, forward: Forward, backward: Backward, seed: int | None = None) -> None:
        """Run forwards and backwards of all micro-batches.

        Args:
            count: how many there are.
            forward: runs one forward.
            backward: runs a backward: of one micro-batch at a time, or under "gpipe" of all at once.
            seed: of the step's random numbers; None: they are left alone.

        Raises:
            BaseException: what any of them raised; the others are wound down then, and no thread is left.
        """
        order = launch_order(self.schedule, self.stages, count, devices=self._devices)
        call = partial(self._forward, forward, count, seed)
        with _Casts() as casts:
            if self.schedule == "1f1b":
                self._wavefront(order, call, backward, casts)
            elif self.schedule == "looped":
                self._loop(order, call, backward, casts)
            elif self.schedule == "gpipe":
                for number in range(count):
                    call(number)
                casts.drop()
                backward(tuple(range(count)))
            else:
                for number in range(count):
                    call(number)
                    backward((number,))

    def evaluate(self, count: int, forward: Forward, seed: int | None = None) -> None:
        """Run forwards of all micro-batches, without backwards.

        Args:
            count: how many there are.
            forward: runs one forward.
            seed: as for `train`.

        Raises:
            BaseException: as for `train`.
        """
        call = partial(self._forward, forward, count, seed)
        with _Casts():
            if self.schedule == "looped" and count > 1:
                order = launch_order("looped", self.stages, count, devices=self._devices, training=False)
                with self._suspended(range(count), call) as runs:
                    for launch in order:
                        runs[launch.micro_batch].forward_through(launch.stage)
            else:
                for number in range(count):
                    call(number)

    # What the doors of blocks tell.

    def arrive(self, block: int) -> None:
        """Hand the baton back if another stage begins here."""
        call = current_call()
        run = None if call is None else self._runs.get(call)
        if run is not None and self._stage_of[block] > run.stage:
            self._tell("suspend")
            mark_ready()
            run.arrive(self._stage_of[block])
            self._tell("resume")

    def enter(self, block: int, args: Any, kwargs: Any) -> None:
        """Tell of the visit, and see to it that a suspended backward stops where it leaves the stage."""
        call = current_call()
        run = None if call is None else self._runs.get(call)
        if run is not None and run.stops_in_backward:
            run.watch(self._stage_of[block], (args, kwargs))
        self._tell("enter", block)

    def leave(self, block: int) -> None:
        """Tell of the visit's end."""
        self._tell("leave", block)

    @property
    def again(self) -> _Again:
        """The visitor that is told of visits in a backward."""
        return _Again(self._beside)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nobody, ()  # the blocks of a model's copy are not those of the run

    def _tell(self, event: str, *args: Any) -> None:
        micro_batch = current_micro_batch()
        if micro_batch is not None:
            for other in self._beside:
                getattr(other, event)(*args, micro_batch)

    def _forward(self, forward: Forward, count: int, seed: int | None, number: int) -> None:
        with working_on(MicroBatch(number, count, seed)):
            self._tell("begin")
            try:
                with compat.casts_kept():
                    forward(number)
            finally:
                self._tell("end")

    def _wavefront(self, order: Sequence[Launch], call: Forward, backward: Backward, casts: _Casts) -> None:
        """Suspended forwards; a micro-batch has its backward whole, in this thread, where its first launch stands."""
        with self._suspended(sorted({launch.micro_batch for launch in order}), call) as runs:
            for launch in order:
                run = runs[launch.micro_batch]
                if not launch.backward:
                    run.forward_through(launch.stage)
                elif launch.stage == self.stages - 1:
                    if all(run.call.has_ended for run in runs.values()):
                        casts.drop()
                    backward((launch.micro_batch,))

    def _loop(self, order: Sequence[Launch], call: Forward, backward: Backward, casts: _Casts) -> None:
        """Forwards and backwards are both suspended, each micro-batch in its own thread."""
        numbers = sorted({launch.micro_batch for launch in order})
        with self._suspended(numbers, call, backward) as runs:
            goes_back = False
            for launch in order:
                if launch.backward and not goes_back:
                    goes_back = True
                    casts.drop()
                run = runs[launch.micro_batch]
                (run.backward_through if launch.backward else run.forward_through)(launch.stage)
            for run in runs.values():
                run.finish()

    @contextmanager
    def _suspended(
        self, numbers: Sequence[int], call: Forward, backward: Backward | None = None
    ) -> Iterator[dict[int, _Run]]:
        """A suspended call for each micro-batch; whatever happens inside, all are wound down."""
        runs = {number: _Run(number, self.stages, call, backward) for number in numbers}
        self._runs = {run.call: run for run in runs.values()}
        try:
            yield runs
        finally:
            try:
                for run in runs.values():
                    run.call.cancel()
            finally:
                self._runs = {}


class _Again:
    """Tells of the visits of blocks that a checkpoint around them runs again in a backward."""

    def __init__(self, beside: Sequence[Beside]) -> None:
        self._beside = beside

    @property
    def again(self) -> _Again:
        return self

    def arrive(self, block: int) -> None:
        """Nothing is suspended in the midst of a backward's node."""

    def enter(self, block: int, args: Any, kwargs: Any) -> None:
        for other in self._beside:
            other.enter_again(block)

    def leave(self, block: int) -> None:
        for other in self._beside:
            other.leave_again(block)


class _Run:
    """One micro-batch on its way through the stages, in a thread of its own.

    Attributes:
        stage: that it is in, or waits to enter.
        stops_in_backward: whether its backward is suspended as well, at the stages' boundaries.
    """

    def __init__(self, number: int, stages: int, forward: Forward, backward: Backward | None) -> None:
        self.stage = 0
        self.stops_in_backward = backward is not None
        self._watched: set[int] = set()
        self._goes_back = False

        def run() -> None:
            forward(number)
            if backward is not None:
                self._goes_back = True
                self.stage = stages - 1
                self.call.hand_back()
                backward((number,))

        self.call = Suspended(run, f"autobalance micro-batch {number}")

    def forward_through(self, stage: int) -> None:
        """Go on until a later stage than this one begins, or to the end of the forward."""
        if not self._goes_back and not self.call.has_ended and self.stage <= stage:
            self.call.resume()

    def backward_through(self, stage: int) -> None:
        """Go back until a stage before this one begins."""
        if not self.call.has_ended and self.stage >= stage:
            self.call.resume()

    def finish(self) -> None:
        """Run what is left: a backward may end where no gradient crosses into the first stages."""
        while not self.call.has_ended:
            self.call.resume()

    def arrive(self, stage: int) -> None:
        """Another stage begins, in forward."""
        if not self._goes_back:
            self.stage = stage
            self.call.hand_back()

    def watch(self, stage: int, inputs: Any) -> None:
        """Have the backward stop where it has done all that came after the first input of a stage."""
        if stage in self._watched or stage == 0 or self._goes_back:
            return
        tensor = next((value for value in tensors_in(inputs) if value.requires_grad), None)
        if tensor is not None:
            self._watched.add(stage)
            tensor.register_hook(partial(self._leave_in_backward, stage))

    def _leave_in_backward(self, stage: int, gradient: Tensor) -> None:
        if self._goes_back and self.stage >= stage and current_call() is self.call:
            self.stage = stage - 1
            mark_gradient_ready(gradient)
            self.call.hand_back()


class _Casts:
    """Keeps autocast's casts of weights from one micro-batch to the next, until the last forward has ended."""

    def __init__(self) -> None:
        self._kept = compat.casts_kept()
        self._is_kept = False

    def __enter__(self) -> _Casts:
        self._kept.__enter__()
        self._is_kept = True
        return self

    def drop(self) -> None:
        """The forwards are done."""
        if self._is_kept:
            self._is_kept = False
            self._kept.__exit__(None, None, None)
            compat.drop_casts()

    def __exit__(self, *error: object) -> None:
        self.drop()


def _nobody() -> None:
    return None
