"""A trial: how one step of the user's training runs, so that it can run on a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autobalance import compat
from autobalance.execution.batches.host_parts import HostParts
from autobalance.execution.pipeline import Pipeline
from autobalance.execution.running import Running
from autobalance.placement.host_locator import HostLocator
from autobalance.placement.move import Mover
from autobalance.profiling.asked import check_callables, checked_loss, made_optimizer
from autobalance.profiling.default_step import call_model, default_step

Step = Callable[[nn.Module, Any], Tensor]
Mark = Callable[[str], None]
Glue = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Batch:
    """One batch of a loader that the run will meet.

    Attributes:
        name: in words, such as "train batch of 32".
        kind: "train", "validate", "test" or "predict".
        data: as the loader yields it, on the host.
        loader: index of the loader among those of its kind.
        in_parts: the same batch in parts, where only its numbers tell what they are; None: they are made of its
            tensors, or nothing is split.
    """

    name: str
    kind: str
    data: Any
    loader: int = 0
    in_parts: HostParts | None = None


class Trial(Protocol):
    """Runs steps on a copy of the model, as the real run will on the model itself.

    Attributes:
        precision: as Lightning names it.
        dtype: to which the model's floating tensors are cast before they reach a device; None: they stay as they are.
    """

    precision: str
    dtype: torch.dtype | None

    def stand_ins(self, root: nn.Module, kind: str) -> Mapping[int, Any]:
        """What stands in the copy for objects that must not be copied, by their id.

        Args:
            root: the user's model.
            kind: of elements, "fake" or "real".
        """

    def prepare(self, twin: nn.Module, device: torch.device) -> Sequence[torch.optim.Optimizer]:
        """Make `twin` ready to run with `device` as its root device, and build its optimizers.

        Args:
            twin: the copy of the model.
            device: where batch and loss are.
        """

    def split(self, pipeline: Pipeline, running: Running) -> None:
        """From now on run batches in micro-batches.

        Args:
            pipeline: runs them; the doors of the copy's blocks tell it of their calls.
            running: into how many parts.
        """

    def run(self, twin: nn.Module, batch: Batch, glue: Glue, mark: Mark) -> None:
        """Run what the real run does with `batch`, telling `mark` where each phase begins.

        Args:
            twin: the copy of the model.
            batch: of one loader.
            glue: a context in which what is outside blocks runs where its operands are.
            mark: told the name of each phase that begins.
        """


class PlainTrial:
    """Trial of a plain module: forward, backward, optimizer step, twice; or two forwards without gradients.

    Example:
        >>> PlainTrial(torch.optim.AdamW, precision="bf16-mixed", accumulate=4, clip=1.0)  # doctest: +SKIP

    Args:
        optimizer: class or callable on parameters; None: no optimizer step.
        step: `step(model, batch) -> loss`; None: call the model (a dict batch as keywords, a tuple as positionals) and
            take its output's `.loss`, else the sum of its floating outputs.
        precision: as Lightning names it.
        training: False runs forward passes without gradients.
        accumulate: batches whose gradients are added before a step.
        clip: largest norm of all gradients together; None: they stay as they are.

    Attributes:
        precision: as given.
        dtype: to which the model's floating tensors, and the batch's, are cast before they reach the device; None:
            they stay as they are.

    Raises:
        ValueError: for a precision that does not exist, no batches to accumulate, or a norm that is not positive.
    """

    STEPS = 2

    def __init__(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        step: Step | None = None,
        precision: str = "32-true",
        training: bool = True,
        accumulate: int = 1,
        clip: float | None = None,
    ) -> None:
        check_callables(optimizer, step)
        _check(precision, training, accumulate, clip)
        self.precision = precision
        self.dtype = _TRUE.get(precision)
        self._make_optimizer = optimizer
        self._step = step or (default_step if training else call_model)
        self._training = training
        self._accumulate = accumulate
        self._clip = clip
        self._optimizers: list[torch.optim.Optimizer] = []
        self._scaler: torch.amp.GradScaler | None = None
        self._device = torch.device("cpu")

    def stand_ins(self, root: nn.Module, kind: str) -> Mapping[int, Any]:
        """Nothing needs a stand-in."""
        return {}

    def prepare(self, twin: nn.Module, device: torch.device) -> Sequence[torch.optim.Optimizer]:
        """Build the optimizer on the parameters that require gradients, and the scaler of 16-bit gradients."""
        self._device = device
        if self._training and self.precision == "16-mixed":
            self._scaler = compat.stepping_scaler(device.type)
        if self._make_optimizer is not None and self._training:
            trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
            self._optimizers = [made_optimizer(self._make_optimizer, trained)]
        return self._optimizers

    def split(self, pipeline: Pipeline, running: Running) -> None:
        """Refuse: where the loss of a plain module is made, and its backward begins, is not known here.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"schedule={running.schedule!r} with {running.micro_batches} micro-batches runs under Lightning's Trainer "
            f"only; a plain module runs whole batches."
        )

    def run(self, twin: nn.Module, batch: Batch, glue: Glue, mark: Mark) -> None:
        """Two training steps, since optimizer state exists only from the second on; or two forwards.

        As in an ordinary loop, the batch and the loss (or output) of the last step live until the next ones are there.
        """
        loss = moved = None
        for number in range(1, self.STEPS + 1):
            for part in range(self._accumulate if self._training else 1):
                moved = self._moved(batch.data)
                if part == 0:
                    for parameter in twin.parameters():
                        parameter.grad = None
                mark(f"step {number} forward")
                with torch.set_grad_enabled(self._training), glue(), self._precise():
                    loss = self._step(twin, moved)
                if self._training:
                    mark(f"step {number} backward")
                    with glue():
                        self._scaled(checked_loss(loss, twin)).backward()
            if self._training:
                mark(f"step {number} optimizer")
                self._update(twin)
                mark(f"step {number} end")  # the next batch comes while gradients are still there

    def _scaled(self, loss: Tensor) -> Tensor:
        if self._accumulate > 1:
            loss = loss / self._accumulate
        scaled: Tensor = loss if self._scaler is None else self._scaler.scale(loss)
        return scaled

    def _update(self, twin: nn.Module) -> None:
        """In the order in which Lightning does it."""
        for optimizer in self._optimizers:
            if self._scaler is not None:
                self._scaler.unscale_(optimizer)
        if self._clip is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), self._clip)
        for optimizer in self._optimizers:
            if self._scaler is None:
                optimizer.step()
            else:
                self._scaler.step(optimizer)
                self._scaler.update()

    def _moved(self, data: Any) -> Any:
        return Mover(HostLocator(self.dtype), self._device).move(data)

    def _precise(self) -> AbstractContextManager[Any]:
        if self.dtype is not None:
            return _default_dtype(self.dtype)
        if self.precision in _MIXED:
            return torch.autocast(self._device.type, dtype=_MIXED[self.precision])
        return nullcontext()


_TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
PRECISIONS = ("32-true", *_MIXED, *_TRUE)


def _check(precision: str, training: bool, accumulate: int, clip: float | None) -> None:
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision={precision!r} is not supported for a plain module: choose among "
            f"{', '.join(map(repr, PRECISIONS))}, or convert the parameters yourself and say '32-true'."
        )
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate={accumulate!r} is no number of batches per optimizer step: say 1 or more.")
    if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
        raise ValueError(
            f"clip={clip!r} would leave nothing of the gradients: say the largest norm that they may have, above 0, "
            f"or None for as large as they are."
        )
    if not training and (accumulate > 1 or clip is not None):
        raise ValueError(
            f"accumulate={accumulate} and clip={clip} are about gradients, of which training=False makes none: leave "
            f"them out, or say training=True."
        )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, floating tensors that are made from nothing have `dtype`, as in Lightning's true half precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
