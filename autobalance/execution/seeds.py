"""Random numbers of a step in micro-batches: the same whatever the placement, the schedule and what is recomputed.

With one stream of random numbers for all, masks of dropout would depend on which device draws and on the order in which
micro-batches are launched. So every visit of a block has a seed of its own, made of the step, the block, how many
visits of it there were before, and the micro-batch; and what a micro-batch draws between blocks is a stream of its own,
which waits while the micro-batch is suspended, since generators belong to the process and not to a thread.

Python's and NumPy's generators, and `torch.Generator` objects of the user's own, are left alone: masks do not come from
them, and who seeds one means exactly that sequence. What a step draws from them comes in the order of launches, which
is the same in every run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from autobalance.compat import call_at_checkpoint, in_backward
from autobalance.execution.micro_batch import MicroBatch


def step_seed(number: int) -> int:
    """The seed of one step, of its number and of where the CPU's generator stands: `seed_everything` decides it.

    The generator stays there: what loaders draw from it, such as the order of the next epoch, is what it is without
    micro-batches.

    Example:
        >>> _ = torch.manual_seed(1)
        >>> step_seed(0) == step_seed(0), step_seed(0) == step_seed(1)
        (True, False)

    Args:
        number: of the step in the run.

    Returns:
        63 bits.
    """
    state = torch.default_generator.get_state().numpy().tobytes()
    return _mixed("step", number, blake2b(state, digest_size=8).hexdigest())


def visit_seed(step: int, block: str, visit: int, micro_batch: int) -> int:
    """The seed of one visit of a block: the same in every process.

    Example:
        >>> visit_seed(1, "layers.0", 0, 0) == visit_seed(1, "layers.0", 0, 1)
        False

    Args:
        step: the step's seed.
        block: the block's name.
        visit: how many visits of the block there were before in the micro-batch.
        micro_batch: index of the micro-batch.

    Returns:
        63 bits.
    """
    return _mixed("block", step, block, visit, micro_batch)


def glue_seed(step: int, micro_batch: int) -> int:
    """The seed of what a micro-batch draws outside of blocks.

    Args:
        step: the step's seed.
        micro_batch: index of the micro-batch.
    """
    return _mixed("glue", step, micro_batch)


def _mixed(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


class SeededVisits:
    """Seeds every visit of a block, and what is drawn between visits; a `Beside` of the pipeline.

    Micro-batches without a seed, which is what a step that is not split has, draw as they would without this.

    Example:
        >>> seeds = SeededVisits(blocks.names, places)                         # doctest: +SKIP
        >>> pipeline = Pipeline("1f1b", stage_of, devices, beside=[seeds])     # doctest: +SKIP
        >>> pipeline.train(4, forward, backward, seed=step_seed())             # doctest: +SKIP

    Args:
        names: of the blocks, in the order of their indices.
        places: device of each block. Simulated devices draw from the CPU's generator.
        root: device of batch and loss, if no block is there.
    """

    def __init__(self, names: Sequence[str], places: Sequence[torch.device], root: torch.device | None = None) -> None:
        self._names = tuple(names)
        self._places = tuple(places)
        self._devices = tuple(dict.fromkeys((*places, *([] if root is None else [root]))))
        call_at_checkpoint(_remembering_visits)

    def begin(self, micro_batch: MicroBatch) -> None:
        """The user's step begins: what it draws outside of blocks is its own from here on."""
        if micro_batch.seed is None:
            return
        _here.stream = stream = _Stream(micro_batch.seed, micro_batch.index)
        stream.outside = _states(self._devices)
        _seed(self._devices, glue_seed(micro_batch.seed, micro_batch.index))

    def end(self, micro_batch: MicroBatch) -> None:
        """The step has returned or failed: generators go on where they were before it."""
        stream, _here.stream = _here.stream, None
        if stream is not None and stream.outside is not None:  # it is None where the micro-batch is wound down
            _restore(stream.outside)

    def suspend(self, micro_batch: MicroBatch) -> None:
        """Others draw next."""
        stream = _here.stream
        if stream is not None and stream.outside is not None:
            stream.own = _states(self._devices)
            _restore(stream.outside)
            stream.outside = None

    def resume(self, micro_batch: MicroBatch) -> None:
        """The micro-batch draws on where it was."""
        stream = _here.stream
        if stream is not None and stream.own is not None:
            stream.outside = _states(self._devices)
            _restore(stream.own)
            stream.own = None

    def enter(self, block: int, micro_batch: MicroBatch) -> None:
        """A block draws next."""
        self._enter(block)

    def leave(self, block: int, micro_batch: MicroBatch) -> None:
        """What lies between blocks draws on where it was."""
        self._leave()

    def enter_again(self, block: int) -> None:
        """A block runs again in a backward, for a checkpoint around it, and draws the same."""
        self._enter(block)

    def leave_again(self, block: int) -> None:
        """It has returned or failed."""
        self._leave()

    def _enter(self, block: int) -> None:
        stream = _here.stream
        if stream is None or stream.before_block is not None:
            return
        name, devices = self._names[block], self._places[block : block + 1]
        visit = stream.visits.get(name, 0)
        stream.visits[name] = visit + 1
        stream.before_block = _states(devices)
        _seed(devices, visit_seed(stream.step, name, visit, stream.micro_batch))

    def _leave(self) -> None:
        stream = _here.stream
        if stream is not None and stream.before_block is not None:
            _restore(stream.before_block)
            stream.before_block = None


States = list[tuple[torch.Generator, Tensor]]


@dataclass
class _Stream:
    """The random numbers of one micro-batch.

    Attributes:
        step: the step's seed.
        micro_batch: its index.
        visits: how many there were, by the block's name.
        outside: states of generators for all others, while this one draws.
        own: states of generators for this one, while it is suspended.
        before_block: states to go on with after the block that runs.
    """

    step: int
    micro_batch: int
    visits: dict[str, int] = field(default_factory=dict)
    outside: States | None = None
    own: States | None = None
    before_block: States | None = None


class _Here(threading.local):
    """The stream that this thread draws from; None where generators are left alone."""

    stream: _Stream | None = None


_here = _Here()


def _generators(devices: Iterable[torch.device]) -> Iterator[torch.Generator]:
    yield torch.default_generator
    if torch.cuda.is_initialized():  # trials on fakes say that they are on GPUs where there is none
        for device in devices:
            if device.type == "cuda":
                yield torch.cuda.default_generators[device.index]


def _states(devices: Iterable[torch.device]) -> States:
    return [(generator, generator.get_state()) for generator in _generators(devices)]


def _restore(states: States) -> None:
    for generator, state in states:
        generator.set_state(state)


def _seed(devices: Iterable[torch.device], seed: int) -> None:
    for generator in _generators(devices):
        generator.manual_seed(seed)


def _remembering_visits(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose blocks draw the same when activation checkpointing calls it again in backward.

    Torch brings back the generators' states as they were outside of blocks, and those only of the devices of the
    function's arguments. Inside a block that is enough.
    """
    stream = _here.stream
    if stream is None or stream.before_block is not None:
        return function
    return partial(_run_remembered, stream.step, stream.micro_batch, dict(stream.visits), function)


def _run_remembered(
    step: int, micro_batch: int, visits: dict[str, int], function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if not in_backward():
        return function(*args, **kwargs)
    with _drawing_from(_Stream(step, micro_batch, dict(visits))):
        return function(*args, **kwargs)


@contextmanager
def _drawing_from(stream: _Stream) -> Iterator[None]:
    before, _here.stream = _here.stream, stream
    try:
        yield
    finally:
        _here.stream = before
