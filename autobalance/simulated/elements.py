"""Elements that are fake: shapes without numbers, and the few real values that are kept beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from autobalance import compat
from autobalance.simulated import clock

if TYPE_CHECKING:
    from autobalance.simulated.tensor import SimulatedTensor

MAX_KNOWN_ELEMENTS = 1 << 20
"""Integer and boolean tensors up to this many elements keep their real value."""
MAX_KNOWN_FLOATS = 16
"""So do floating-point tensors up to this many: scales, counters, flags."""

fake_mode: Any = None
"""The FakeTensorMode in which elements are computed; None: elements are real."""

on_placeholder: Callable[[str], None] | None = None
"""Told the kind ("float") whenever a number that nobody knows is asked for and a placeholder is given."""


on_read: Callable[[], None] | None = None
"""Told whenever the host asks for the numbers of a tensor on a device, for which it has to wait there."""


@contextlib.contextmanager
def reading(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell()` whenever the host asks for numbers inside.

    Args:
        tell: what is called.
    """
    global on_read
    before, on_read = on_read, tell
    try:
        yield
    finally:
        on_read = before


class Cell:
    """What holds of the real value of a storage, for all views of it.

    Attributes:
        holds: False once something unknown was written over it.
        guessed: whether it is only what it might be.
    """

    __slots__ = ("guessed", "holds")

    def __init__(self) -> None:
        self.holds = True
        self.guessed = False


class Known:
    """A real value, and whether it still holds: one `cell` is shared by all views of a storage.

    Args:
        tensor: the value.
        cell: of the storage.
    """

    __slots__ = ("_cell", "_tensor")

    def __init__(self, tensor: torch.Tensor, cell: Cell) -> None:
        self._tensor = tensor
        self._cell = cell

    @property
    def tensor(self) -> torch.Tensor | None:
        """The value, or None once something unknown was written over it."""
        return self._tensor if self._cell.holds else None

    @property
    def guessed(self) -> bool:
        """Whether it is only what the value might be."""
        return self._cell.guessed


_cells: dict[int, Cell] = {}


@contextlib.contextmanager
def fake_elements(mode: Any, placeholder_note: Callable[[str], None] | None = None) -> Iterator[None]:
    """Compute shapes only: inside, elements of simulated tensors are fakes of `mode`.

    Kernels are chosen exactly as with real elements, so bytes counted inside equal those of the real run.

    Example:
        >>> with fake_elements(FakeTensorMode()):
        ...     loss = model(batch.to("simulated:0"))

    Args:
        mode: a `torch._subclasses.FakeTensorMode`; None: elements are real inside.
        placeholder_note: called with the kind of every number that is asked for but unknown ("float").
    """
    global fake_mode, on_placeholder
    before = fake_mode, on_placeholder
    fake_mode, on_placeholder = mode, placeholder_note
    try:
        yield
    finally:
        fake_mode, on_placeholder = before
        if fake_mode is None:
            _cells.clear()


def fake_like(tensor: torch.Tensor) -> torch.Tensor:
    """A fake with the sizes, strides and type of `tensor`, in a storage of its own.

    Args:
        tensor: any.
    """
    with fake_mode:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor's real value is worth keeping.

    Args:
        tensor: any.
    """
    limit = MAX_KNOWN_FLOATS if tensor.dtype.is_floating_point or tensor.dtype.is_complex else MAX_KNOWN_ELEMENTS
    return tensor.numel() <= limit


def remember(tensor: SimulatedTensor, elements: torch.Tensor, value: torch.Tensor, guessed: bool = False) -> None:
    """Keep `value` as the real value of `tensor`, until something unknown is written to the storage of `elements`.

    Args:
        tensor: whose value it is.
        elements: of the tensor.
        value: on the CPU.
        guessed: whether it is only what the value might be.
    """
    if not is_small(value):
        return
    key = compat.storage_key(elements.untyped_storage())
    cell = _cells.get(key)
    if cell is None or not cell.holds:
        cell = _cells[key] = Cell()
    cell.guessed |= guessed
    tensor.known_value = Known(value, cell)


def forget(elements: torch.Tensor) -> None:
    """Something unknown was written: nothing that shares the storage of `elements` is known any longer.

    Args:
        elements: of a simulated tensor.
    """
    cell = _cells.pop(compat.storage_key(elements.untyped_storage()), None)
    if cell is not None:
        cell.holds = False


def numbers(tensor: SimulatedTensor) -> torch.Tensor:
    """Numbers on the CPU: those of the elements, else the known ones, else a placeholder of ones that is noted.

    Args:
        tensor: what the host asks for.

    Raises:
        DataDependentOutputException: they are unknown integers or booleans, on which the shapes and the branches of
            the rest may depend.
    """
    elements, known = tensor.elements, tensor.known
    hands = clock.running()
    if hands is not None and tensor.index is not None:
        nbytes = elements.numel() * elements.itemsize
        hands.copy_with_host(clock.current_stream(tensor.index), nbytes, to_host=True, host_waits=True)
    if on_read is not None:
        on_read()
    if not compat.is_fake(elements):
        return elements.detach()
    if known is not None:
        return known
    if not elements.dtype.is_floating_point:
        with elements.fake_mode:  # type: ignore[attr-defined] # a fake tensor has one
            elements.flatten()[0].item()
    if on_placeholder is not None:
        on_placeholder("float")
    return torch.ones(elements.shape, dtype=elements.dtype)
