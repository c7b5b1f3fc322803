"""One micro-batch on its way through the stages, forward and back, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autobalance.execution.suspended import Suspended, current_call
from autobalance.execution.workers import Workers
from autobalance.placement.contents import tensors_in
from autobalance.placement.ready import mark_gradient_ready, marks_forgotten

Forward = Callable[[int], None]
"""Runs the user's step on the micro-batch of this number, up to its loss, and keeps what it returns."""
Backward = Callable[[Sequence[int]], None]
"""Runs one backward of the losses of these micro-batches."""


class InStages:
    """A step that stops at the boundaries of stages.

    Args:
        number: of the micro-batch.
        stages: how many there are.
        forward: runs the step.
        backward: runs its backward, which stops at the boundaries as well; None: another thread does that.
        workers: whose thread runs it.

    Attributes:
        call: the step.
        stage: that it is in, or waits to enter.
        stops_in_backward: whether its backward is suspended as well, at the stages' boundaries.
    """

    def __init__(self, number: int, stages: int, forward: Forward, backward: Backward | None, workers: Workers) -> None:
        self.stage = 0
        self.stops_in_backward = backward is not None
        self._watched: set[int] = set()
        self._goes_back = False

        def run() -> None:
            with marks_forgotten():
                forward(number)
                if backward is not None:
                    self._goes_back = True
                    self.stage = stages - 1
                    self.call.hand_back()
                    # Autograd's own threads, which it has for GPUs, could not be stopped at a stage's boundary.
                    with torch.autograd.set_multithreading_enabled(False):
                        backward((number,))

        self.call = Suspended(run, f"autobalance micro-batch {number}", workers)

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
        # Not a weight: a hook on a leaf would outlive the graph, and its gradient may come at any time.
        tensor = next((value for value in tensors_in(inputs) if value.grad_fn is not None), None)
        if tensor is not None:
            self._watched.add(stage)
            tensor.register_hook(partial(self._leave_in_backward, stage))

    def _leave_in_backward(self, stage: int, gradient: Tensor) -> None:
        if self._goes_back and self.stage >= stage and current_call() is self.call:
            self.stage = stage - 1
            mark_gradient_ready(gradient)
            self.call.hand_back()
