"""Blocks that make what they have saved again, right before their backward.

One non-reentrant region of `torch.utils.checkpoint` around each call of a block's forward (Chen et al. 2016, "Training
Deep Nets with Sublinear Memory Cost"). The block's door and hooks are outside, so they do not run again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autobalance.compat import buffer_table, is_batch_norm, is_instance_norm, version
from autobalance.execution.savings.given import Given
from autobalance.placement.hooks import Door, Remove, inside, replace_method, run_method


@dataclass(frozen=True, eq=False)
class _Recomputed:
    """A block that recomputes; `device` is where its random numbers and autocast are."""

    door: Door
    device: torch.device


class _Running(threading.local):
    """Blocks of which this thread is inside a region."""

    def __init__(self) -> None:
        self.blocks: list[_Recomputed] = []


_running = _Running()


def recompute(door: Door, device: torch.device, module: nn.Module, methods: Sequence[str]) -> list[Remove]:
    """Let methods of a block's module keep nothing but what they are given between forward and backward.

    Without gradients they run as ever. The forward that runs again sees the random state, the autocast state and the
    device of the first, and containers as they were given; it updates no running statistics.

    Example:
        >>> removes = recompute(door, torch.device("cuda", 0), block, ["forward"])     # doctest: +SKIP

    Args:
        door: of the block.
        device: where it is.
        module: the block, or one of its modules.
        methods: names, "forward" among them.

    Returns:
        What undoes it.
    """
    return [replace_method(module, name, partial(_run_twice, _Recomputed(door, device))) for name in methods]


def _run_twice(
    block: _Recomputed, module: nn.Module, name: str, inner: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled() or block in _running.blocks:
        return run_method(module, name, inner, args, kwargs)
    given = Given.of(args, kwargs)
    region = _Region(block, module, partial(run_method, module, name, inner), given, (args, kwargs))
    before = versions_of_buffers(module)
    # The device's random and autocast state is kept where an argument is on it; the block's own may be on the host.
    anchor = torch.empty(0, device=block.device)
    output = checkpoint(region, anchor, *given.tensors, use_reentrant=False, context_fn=region.contexts)
    _refuse_changed_buffers(block.door.name, module, before)
    return output


class _Region:
    """One call of a block: called once by the forward, then by the backward, each time that it needs saved tensors."""

    def __init__(
        self,
        block: _Recomputed,
        module: nn.Module,
        run: Callable[[Any, Any], Any],
        given: Given,
        first: tuple[Any, Any],
    ) -> None:
        self._block = block
        self._module = module
        self._run = run
        self._containers = Given((), given.containers)  # the tensors are the checkpoint's, which watches their versions
        self._first: tuple[Any, Any] | None = first
        self._stack: list[ExitStack] = []

    def __call__(self, anchor: Tensor, *tensors: Tensor) -> Any:
        first, self._first = self._first, None
        args, kwargs = self._containers.call(tensors) if first is None else first
        with _inside_region(self._block):
            return self._run(args, kwargs)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What the forward runs in, and what it runs in again."""
        return nullcontext(), self

    def __enter__(self) -> None:
        with ExitStack() as entering:
            entering.enter_context(inside(self._block.door))
            entering.enter_context(_statistics_kept(self._module))
            self._stack.append(entering.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._stack.pop().close()


@contextmanager
def _inside_region(block: _Recomputed) -> Iterator[None]:
    _running.blocks.append(block)
    try:
        yield
    finally:
        _running.blocks.remove(block)


@contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    """Inside, running statistics stay as they are: with a momentum of 0 each is replaced by itself."""
    norms: list[Any] = [part for part in module.modules() if has_statistics(part)]
    before = [(norm.momentum, buffer_table(norm).get("num_batches_tracked")) for norm in norms]
    for norm, (_, counter) in zip(norms, before, strict=True):
        norm.momentum = 0.0
        if counter is not None:
            buffer_table(norm)["num_batches_tracked"] = None
    try:
        yield
    finally:
        for norm, (momentum, counter) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if counter is not None:
                buffer_table(norm)["num_batches_tracked"] = counter


def has_statistics(part: nn.Module) -> bool:
    """Whether a module keeps running statistics, which change without counting it.

    Example:
        >>> has_statistics(nn.BatchNorm1d(2))
        True

    Args:
        part: one module, without those inside it.
    """
    return (is_batch_norm(part) or is_instance_norm(part)) and bool(part.track_running_stats)


Versions = list[tuple[nn.Module, str, Tensor, int]]


def versions_of_buffers(module: nn.Module) -> Versions:
    """Buffers that a forward which runs again would change twice, as they are; running statistics are kept from that.

    Example:
        >>> versions_of_buffers(nn.BatchNorm1d(2))
        []

    Args:
        module: a block, or one of its modules.
    """
    return [
        (part, name, buffer, version(buffer))
        for part in module.modules()
        if not has_statistics(part)
        for name, buffer in buffer_table(part).items()
        if buffer is not None and not buffer.is_inference()
    ]


def changed_buffer(module: nn.Module, before: Versions) -> str | None:
    """Name in `module` of a buffer that was changed, or replaced; None if there is none.

    Example:
        >>> changed_buffer(block, versions_of_buffers(block))     # doctest: +SKIP

    Args:
        module: a block, or one of its modules.
        before: what `versions_of_buffers` said before its forward.
    """
    for part, name, buffer, number in before:
        if buffer_table(part).get(name) is not buffer or version(buffer) != number:
            path = next(path for path, other in module.named_modules() if other is part)
            return f"{path}.{name}" if path else name
    return None


def _refuse_changed_buffers(block: str, module: nn.Module, before: Versions) -> None:
    name = changed_buffer(module, before)
    if name is not None:
        raise RuntimeError(
            f"block {block!r} changes its buffer {name!r} in its forward, which the plan lets run again in the "
            f"backward: the buffer would be changed twice, and the second forward would see another one than the "
            f"first. Plan with recompute=False."
        )
