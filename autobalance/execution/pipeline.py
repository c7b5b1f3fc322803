"""Micro-batches through the stages of a plan, launched in the order of its schedule by the user's own forward.

The user's code runs once for each micro-batch. Where the next stage begins, which is where a block of that stage is
called, its thread hands the baton back, and another micro-batch goes on. The graph of autograd is never cut: what skips
stages, is shared or is computed between blocks needs nothing special.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from autobalance import compat
from autobalance.execution.beside import Again, Beside
from autobalance.execution.in_stages import Backward, Forward, InStages
from autobalance.execution.kept_casts import KeptCasts
from autobalance.execution.micro_batch import MicroBatch, current_micro_batch, working_on
from autobalance.execution.suspended import Suspended, current_call
from autobalance.execution.workers import Workers
from autobalance.placement.ready import mark_ready
from autobalance.schedules.launches import Launch, launch_order


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
        self._runs: dict[Suspended, InStages] = {}
        self._workers = Workers()

    def close(self) -> None:
        """End the threads that are kept for the next step; further steps may come."""
        self._workers.end()

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
        with KeptCasts() as casts:
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
        with KeptCasts():
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
            _drop_workspaces()
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
    def again(self) -> Again:
        """The visitor that is told of visits in a backward."""
        return Again(self._beside)

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
                _drop_workspaces()

    def _wavefront(self, order: Sequence[Launch], call: Forward, backward: Backward, casts: KeptCasts) -> None:
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

    def _loop(self, order: Sequence[Launch], call: Forward, backward: Backward, casts: KeptCasts) -> None:
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
    ) -> Iterator[dict[int, InStages]]:
        """A suspended call for each micro-batch; whatever happens inside, all are wound down."""
        runs = {number: InStages(number, self.stages, call, backward, self._workers) for number in numbers}
        self._runs = {run.call: run for run in runs.values()}
        with ExitStack() as all_of_them:  # a second interrupt ends one wait, and not those for the others
            all_of_them.callback(self._runs.clear)
            all_of_them.push(self._close_after_error)
            for run in runs.values():
                all_of_them.callback(run.call.cancel)
            yield runs

    def _close_after_error(self, kind: type[BaseException] | None, *others: object) -> None:
        if kind is not None:
            self.close()


def _drop_workspaces() -> None:
    """Let no suspended thread keep workspaces of cuBLAS on the GPUs it has used: each has its own, of megabytes."""
    if current_call() is not None and torch.cuda.is_initialized():
        compat.drop_cuda_workspaces(torch.device("cuda"))


def _nobody() -> None:
    return None
