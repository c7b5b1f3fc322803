"""Blocks whose weights are in pinned host memory, and on the device while they run.

The parameters stay on the host, where gradients are added up and the optimizer's step runs. For each call of a block
copies stand for them on the device, and are fetched again for the backward; those of the block that runs next are on
their way meanwhile, as `autobalance.partitioning.judge` counts them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autobalance.compat import (
    buffer_table,
    call_at_checkpoint,
    flat_weights_of,
    in_backward,
    parameter_table,
    storage_key,
    version,
)
from autobalance.execution.savings.host_copies import Arrival, to_device, to_host
from autobalance.execution.savings.offload import OnHostUntilBackward
from autobalance.execution.savings.recompute import has_statistics
from autobalance.execution.savings.saved_tensors import Rest, SavedTensors
from autobalance.placement.hooks import Door, Remove, replace_method, run_method


@dataclass(eq=False)
class Streaming:
    """A module of a block whose weights are in host memory.

    Attributes:
        door: of the block.
        device: where it runs.
        module: the block, or one of its modules.
        saving: what becomes of what it saves: "keep", "recompute" or "offload".
        following: what streams next on that device in the forward.
        before: what streamed last, which is next in the backward.
    """

    door: Door
    device: torch.device
    module: nn.Module
    saving: str
    following: Streaming | None = None
    before: Streaming | None = None
    _ahead: dict[int, tuple[int, Arrival]] = field(default_factory=dict)

    def fetch(self, tensor: Tensor) -> Arrival:
        """A copy of one of the weights on the device: the one that is on its way, if there is.

        Args:
            tensor: a parameter or buffer of the module.
        """
        number, arrival = self._ahead.pop(id(tensor), (-1, None))
        if arrival is not None and number == version(tensor):
            return arrival
        # In inference mode it could not be saved by a later forward.
        with torch.inference_mode(False), torch.no_grad():
            return to_device(Arrival(tensor.detach()), self.device)

    def fetch_ahead(self) -> None:
        """Send for all the weights."""
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if id(tensor) not in self._ahead:
                self._ahead[id(tensor)] = version(tensor), self.fetch(tensor)

    def begin(self) -> None:
        """It runs now: let the next one be on its way, and drop what was sent for and never used."""
        following = self.before if in_backward() else self.following
        self._ahead.clear()
        for other in (self.before, self.following):
            if other is not None and other is not following:
                other._ahead.clear()
        if following is not None:
            following.fetch_ahead()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": {}}  # a copy has other weights


def stream(streaming: Streaming, methods: Sequence[str]) -> list[Remove]:
    """Let methods of a block's module run on copies of its weights, which stay in host memory.

    Example:
        >>> removes = stream(Streaming(door, device, block, "keep"), ["forward"])     # doctest: +SKIP

    Args:
        streaming: the module, whose parameters and buffers are in host memory.
        methods: names, "forward" among them.

    Returns:
        What undoes it.
    """
    return [replace_method(streaming.module, name, partial(_run_streaming, streaming)) for name in methods]


class _Running(threading.local):
    """Modules that have their weights on the device in this thread."""

    def __init__(self) -> None:
        self.modules: list[Streaming] = []


_running = _Running()


def _run_streaming(
    streaming: Streaming, module: nn.Module, name: str, inner: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    if streaming in _running.modules:
        return run_method(module, name, inner, args, kwargs)
    call_at_checkpoint(_remembering_weights)
    with _weights_on_device(streaming) as known:
        # A region that is run again keeps what it is given, and makes the rest, copies of weights too.
        if not torch.is_grad_enabled() or streaming.saving == "recompute":
            return run_method(module, name, inner, args, kwargs)
        rest_of = partial(OnHostUntilBackward, streaming.device) if streaming.saving == "offload" else None
        door, device = streaming.door, streaming.device
        saved = SavedTensors(door, device, known=known, rest_of=rest_of, begin_backward=streaming.begin)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            output = run_method(module, name, inner, args, kwargs)
        saved.end_forward()
        return output


def _remembering_weights(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that has the present weights on the device when a checkpoint of the user's runs it in backward."""
    return partial(_run_on_device, tuple(_running.modules), function) if _running.modules else function


def _run_on_device(modules: tuple[Streaming, ...], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as entered:
        for streaming in modules:
            if streaming not in _running.modules:
                entered.enter_context(_weights_on_device(streaming))
        return function(*args, **kwargs)


class _Weights:
    """Weights that are copied to the device again for the backward."""

    where = "a weight that streams from the host"

    def __init__(self, streaming: Streaming, tensor: Tensor) -> None:
        self.witness = tensor
        self.version = version(tensor)
        self._streaming = streaming

    def arrive(self) -> Arrival:
        """Its elements in a row, on the device."""
        arrival = self._streaming.fetch(self.witness)
        length = arrival.tensor.untyped_storage().nbytes() // arrival.tensor.element_size()
        return Arrival(arrival.tensor.as_strided((length,), (1,), 0), arrival.done)

    def is_of(self, storage: torch.UntypedStorage, number: int) -> bool:
        """Nobody asks: it is known by the storage of its copy."""
        return False


class _Fetched(torch.autograd.Function):
    """A copy of a weight on the device, whose gradient goes to the host."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, there: Tensor) -> Tensor:
        """Give `there`, which has the numbers of `weight`."""
        return there.view_as(there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Bring the gradient to where the weight is."""
        return to_host(gradient).wait(), None


class _Lent(NamedTuple):
    """A copy on the device that stands for a tensor of a module, and the copy's version when it was made."""

    part: nn.Module
    name: str
    tensor: Tensor
    there: Tensor
    version: int


@contextmanager
def _weights_on_device(streaming: Streaming) -> Iterator[dict[int, Rest]]:
    """Inside, the module's parameters and buffers are copies on its device; gives what these are, by storage."""
    known: dict[int, Rest] = {}
    arrivals = [(part, name, tensor, streaming.fetch(tensor)) for part, name, tensor in _registered(streaming)]
    streaming.begin()
    with ExitStack() as leaving:  # one that cannot be put back keeps no other on the device
        _running.modules.append(streaming)
        leaving.callback(_running.modules.remove, streaming)
        while arrivals:
            part, name, tensor, arrival = arrivals.pop()
            there = arrival.wait()
            if not has_statistics(part) or name in parameter_table(part):
                known[storage_key(there.untyped_storage())] = _Weights(streaming, tensor)
            if torch.is_grad_enabled() and tensor.requires_grad:
                there = _Fetched.apply(tensor, there)  # type: ignore[no-untyped-call]
            leaving.callback(_put_back, _Lent(part, name, tensor, there, version(there)))
            _table(part, name)[name] = there
        with flat_weights_of(streaming.module):
            yield known


def _registered(streaming: Streaming) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for part in streaming.module.modules():
        for table in (parameter_table(part), buffer_table(part)):
            for name, tensor in table.items():
                if tensor is not None:
                    yield part, name, tensor


def _table(part: nn.Module, name: str) -> dict[str, Any]:
    return parameter_table(part) if name in parameter_table(part) else buffer_table(part)


def _put_back(lent: _Lent) -> None:
    """Let a module have its tensor on the host again, with what the forward has made of a buffer."""
    part, name, tensor, there, number = lent
    table = _table(part, name)
    now, table[name] = table[name], tensor
    if table is parameter_table(part) or now is None:
        return
    # Where the forward runs again, running statistics stay.
    counts = has_statistics(part) and part.training and not in_backward()
    if now is there and version(there) == number and not counts:
        return
    with torch.no_grad():
        if now.shape == tensor.shape and now.dtype == tensor.dtype:
            tensor.copy_(now)
        else:
            table[name] = now.detach().to("cpu")
