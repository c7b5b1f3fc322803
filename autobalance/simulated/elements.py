"""Elements that are fake: shapes without numbers, and the few real values that are kept beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autobalance import compat
from autobalance.simulated import ledger
from autobalance.simulated.tensor import SimulatedTensor

MAX_KNOWN_ELEMENTS = 1 << 20
"""Integer and boolean tensors up to this many elements keep their real value."""
MAX_KNOWN_FLOATS = 16
"""So do floating-point tensors up to this many: scales, counters, flags."""

fake_mode: Any = None
"""The FakeTensorMode in which elements are computed; None: elements are real."""

on_placeholder: Callable[[str], None] | None = None
"""Told the kind ("float") whenever a number that nobody knows is asked for and a placeholder is given."""


class Known:
    """A real value, and whether it still holds: one `cell` is shared by all views of a storage."""

    __slots__ = ("_cell", "_tensor")

    def __init__(self, tensor: torch.Tensor, cell: list[bool]) -> None:
        self._tensor = tensor
        self._cell = cell

    @property
    def tensor(self) -> torch.Tensor | None:
        return self._tensor if self._cell[0] else None


_cells: dict[int, list[bool]] = {}


@contextlib.contextmanager
def fake_elements(mode: Any, placeholder_note: Callable[[str], None] | None = None) -> Iterator[None]:
    """Compute shapes only: inside, elements of simulated tensors are fakes of `mode`.

    Kernels are chosen exactly as with real elements, so bytes counted inside equal those of the real run.

    Example:
        >>> with fake_elements(FakeTensorMode()):
        ...     loss = model(batch.to("simulated:0"))

    Args:
        mode: a `torch._subclasses.FakeTensorMode`.
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
    """A fake with the sizes, strides and type of `tensor`, in a storage of its own."""
    with fake_mode:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


def fake_elements_of(tensor: SimulatedTensor) -> torch.Tensor:
    """Elements of a simulated tensor as fakes; those of a tensor made before elements were fake are replaced by a twin.

    The twin's storage counts as known to the ledger, as the real one is already.
    """
    if compat.is_fake(tensor.elements):
        return tensor.elements
    twin: torch.Tensor | None = tensor.__dict__.get("twin")
    if twin is None or twin.shape != tensor.elements.shape:
        twin = fake_like(tensor.elements)
        ledger.adopt(twin.untyped_storage())
        tensor.__dict__["twin"] = twin
        if tensor.known_value is None:
            remember(tensor, twin, tensor.elements.detach().clone())
    return twin


def known_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Real value of any operand: a host tensor is its own."""
    if isinstance(tensor, SimulatedTensor):
        return tensor.known
    return None if compat.is_fake(tensor) else tensor


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor's real value is worth keeping."""
    limit = MAX_KNOWN_FLOATS if tensor.dtype.is_floating_point or tensor.dtype.is_complex else MAX_KNOWN_ELEMENTS
    return tensor.numel() <= limit


def remember(tensor: SimulatedTensor, elements: torch.Tensor, value: torch.Tensor) -> None:
    """Keep `value` as the real value of `tensor`, until something unknown is written to its storage."""
    if not is_small(value):
        return
    key = compat.storage_key(elements.untyped_storage())
    cell = _cells.get(key)
    if cell is None or not cell[0]:
        cell = _cells[key] = [True]
    tensor.known_value = Known(value, cell)


def forget(elements: torch.Tensor) -> None:
    """Something unknown was written: nothing that shares the storage of `elements` is known any longer."""
    cell = _cells.pop(compat.storage_key(elements.untyped_storage()), None)
    if cell is not None:
        cell[0] = False


def placeholder(elements: torch.Tensor) -> Any:
    """The number handed out for one that nobody knows.

    Raises:
        torch._subclasses.fake_tensor.DataDependentOutputException: it is an integer or a boolean, on which the
            shapes and the branches of the rest may depend.
    """
    if not elements.dtype.is_floating_point:
        with fake_mode:
            return elements.item()
    if on_placeholder is not None:
        on_placeholder("float")
    return 1.0
