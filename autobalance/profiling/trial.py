"""A trial: how one step of the user's training runs, so that it can run on a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autobalance.profiling.nested import tensors_in

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
    """

    name: str
    kind: str
    data: Any
    loader: int = 0


class Trial(Protocol):
    """Runs steps on a copy of the model, as the real run will on the model itself."""

    precision: str

    def stand_ins(self, root: nn.Module, kind: str) -> Mapping[int, Any]:
        """What stands in the copy for objects that must not be copied, by their id.

        Args:
            root: the user's model.
            kind: of elements, "fake" or "real".
        """

    def prepare(self, twin: nn.Module, device: torch.device) -> Sequence[torch.optim.Optimizer]:
        """Make `twin` ready to run with `device` as its root device, and build its optimizers."""

    def run(self, twin: nn.Module, batch: Batch, glue: Glue, mark: Mark) -> None:
        """Run what the real run does with `batch`, telling `mark` where each phase begins."""


class PlainTrial:
    """Trial of a plain module: forward, backward, optimizer step, twice; or two forwards without gradients.

    Args:
        optimizer: class or callable on parameters; None: no optimizer step.
        step: `step(model, batch) -> loss`; None: call the model (a dict batch as keywords, a tuple as positionals) and
            take its output's `.loss`, else the sum of its floating outputs.
        precision: as Lightning names it; "-mixed" runs the forward under autocast.
        training: False runs forward passes without gradients.
    """

    STEPS = 2

    def __init__(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        step: Step | None = None,
        precision: str = "32-true",
        training: bool = True,
    ) -> None:
        self.precision = precision
        self._make_optimizer = optimizer
        self._step = step or (default_step if training else call_model)
        self._training = training
        self._optimizers: list[torch.optim.Optimizer] = []
        self._device = torch.device("cpu")

    def stand_ins(self, root: nn.Module, kind: str) -> Mapping[int, Any]:
        """Nothing needs a stand-in."""
        return {}

    def prepare(self, twin: nn.Module, device: torch.device) -> Sequence[torch.optim.Optimizer]:
        """Set the training mode and build the optimizer on the parameters that require gradients."""
        self._device = device
        if self._make_optimizer is not None and self._training:
            trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
            self._optimizers = [self._make_optimizer(trained)]
        return self._optimizers

    def run(self, twin: nn.Module, batch: Batch, glue: Glue, mark: Mark) -> None:
        """Two training steps, since optimizer state exists only from the second on; or two forwards.

        As in an ordinary loop, the batch and the loss (or output) of the last step live until the next ones are there.
        """
        loss = None
        for number in range(1, self.STEPS + 1):
            moved = self._moved(batch.data)
            for parameter in twin.parameters():
                parameter.grad = None
            mark(f"step {number} forward")
            with torch.set_grad_enabled(self._training), glue(), self._autocast():
                loss = self._step(twin, moved)
            if not self._training:
                continue
            mark(f"step {number} backward")
            with glue():
                loss.backward()
            mark(f"step {number} optimizer")
            for optimizer in self._optimizers:
                optimizer.step()

    def _moved(self, data: Any) -> Any:
        from autobalance.placement.move import Mover

        return Mover(HostLocator(), self._device).move(data)

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self.precision.endswith("-mixed"):
            return nullcontext()
        dtype = torch.bfloat16 if self.precision.startswith("bf16") else torch.float16
        return torch.autocast(self._device.type, dtype=dtype)


class HostLocator:
    """Moves tensors from the host, and from anywhere else, to a device."""

    @property
    def nothing_moves(self) -> bool:
        """Batches move."""
        return False

    def place_of(self, tensor: Tensor) -> Any:
        """The tensor's device."""
        return tensor.device

    def send(self, tensor: Tensor, place: Any) -> Tensor:
        """A copy on the device."""
        return tensor.to(place)

    def send_object(self, value: Any, place: Any) -> Any:
        """What the object's own `.to` returns."""
        return value.to(place)

    def changed_in_place(self, tensor: Tensor, place: Any, block: str) -> None:
        """Nobody keeps the host's tensor."""

    def enter(self, place: Any) -> Any:
        """Nothing is current."""

    def leave(self, token: Any) -> None:
        """Nothing was current."""


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model with a mapping as keywords, a tuple as positionals, anything else as the only argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def default_step(model: nn.Module, batch: Any) -> Tensor:
    """Call the model and reduce what it returns to a loss.

    Args:
        model: called with a mapping as keywords, a tuple as positionals, anything else as the only argument.
        batch: the batch.

    Returns:
        The output's `.loss` (or `["loss"]`) if it has one, else the sum of its floating tensors.

    Raises:
        ValueError: if the output holds no floating tensor.
    """
    output = call_model(model, batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    sums = [tensor.sum() for tensor in tensors_in(output) if tensor.is_floating_point()]
    if not sums:
        raise ValueError(
            f"{type(model).__name__} returned {type(output).__name__}, which holds no floating tensor to run backward "
            f"from. Pass `step=`, a function of (model, batch) that returns the loss."
        )
    total = sums[0]
    for other in sums[1:]:
        total = total + other.to(total.device)
    return total
