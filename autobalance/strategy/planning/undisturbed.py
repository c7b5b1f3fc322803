"""Look at the user's data without leaving a trace: random states, samplers, datasets and loaders are put back.

What cannot be put back is a stream that is read once, such as a generator or an open connection.
"""

from __future__ import annotations

import io
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from autobalance.profiling.sandbox import random_state_kept

Restore = Callable[[], None]

_OPAQUE = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, Tensor, np.ndarray, nn.Module)
_LONGEST_CONTAINER = 10_000  # longer ones hold samples, not the state of a sampler
_MOST_OBJECTS = 20_000


@contextmanager
def undisturbed(*owners: object) -> Iterator[None]:
    """Put back every random state of the process, and the state of the data sources that `owners` hold, on leaving.

    Example:
        >>> loader = DataLoader(range(8), shuffle=True, generator=torch.Generator().manual_seed(0))
        >>> with undisturbed(loader):
        ...     seen = list(loader)
        >>> [int(x) for x in seen] == [int(x) for x in loader]
        True

    Args:
        owners: loaders, and modules or other objects whose attributes hold loaders, samplers, datasets or generators.
    """
    restores = _states_in(owners)
    with random_state_kept():
        try:
            yield
        finally:
            for restore in restores:
                restore()


def _states_in(owners: Iterable[object]) -> list[Restore]:
    """How to put back whatever state of data sources can be reached from `owners`."""
    restores: list[Restore] = []
    seen: set[int] = set()
    pending: deque[Any] = deque()
    for owner in owners:
        # A module or data module has attributes of every kind (its Trainer, for one): only its data sources are ours.
        if isinstance(owner, nn.Module) or hasattr(owner, "prepare_data_per_node"):
            pending.extend(value for value in vars(owner).values() if _is_source(value))
        else:
            pending.append(owner)
    alive = []  # ids stay unique while their objects live
    while pending and len(seen) < _MOST_OBJECTS:
        value = pending.popleft()
        if isinstance(value, _OPAQUE) or id(value) in seen:
            continue
        seen.add(id(value))
        alive.append(value)
        restore, inside = _state_of(value)
        restores += restore
        pending.extend(inside)
    return restores


def _is_source(value: object) -> bool:
    return _random_state(value) is not None or isinstance(value, (DataLoader, Dataset, Sampler))


def _state_of(value: Any) -> tuple[list[Restore], list[Any]]:
    """How to put back the state of one object, and the objects inside it."""
    restore = _random_state(value)
    if restore is not None:
        return [restore], []
    if isinstance(value, (list, deque, set, dict)):
        if len(value) > _LONGEST_CONTAINER:
            return [], []
        saved = value.copy()
        return [lambda: _refill(value, saved)], list(saved.values() if isinstance(saved, dict) else saved)
    if isinstance(value, (tuple, frozenset)):
        return [], list(value)[:_LONGEST_CONTAINER]
    if isinstance(value, types.MethodType):
        return [], [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        return [], [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    if isinstance(value, io.IOBase):
        position = value.tell() if not value.closed and value.seekable() else None
        return [] if position is None else [lambda: _call(value.seek, position)], []
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return [], []
    kept = dict(attributes)

    def put_back() -> None:
        attributes.clear()
        attributes.update(kept)

    return [put_back, *_loadable_state(value)], list(kept.values())


def _random_state(value: Any) -> Restore | None:
    """How to put back a random number generator; None for anything else."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: _call(value.set_state, state)
    if isinstance(value, random.Random):
        python = value.getstate()
        return lambda: value.setstate(python)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state()
        return lambda: value.set_state(legacy)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", bits)
    return None


def _loadable_state(value: Any) -> list[Restore]:
    """State outside Python attributes, of samplers and datasets that can save and load it."""
    if isinstance(value, (Sampler, Dataset)) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        state = value.state_dict()
        return [lambda: value.load_state_dict(state)]
    return []


def _call(function: Callable[..., object], *args: object) -> None:
    function(*args)


def _refill(container: Any, saved: Any) -> None:
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(saved)


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
