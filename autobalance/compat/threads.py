"""Private names of torch's thread-local state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

from autobalance.compat.backend import private_backend_name

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def autograd_uses_threads() -> bool:
    """Whether a backward that this thread asks for may run in autograd's own threads."""
    return bool(torch._C._is_multithreading_enabled())


@dataclass(frozen=True)
class AutocastState:
    """Autocast of one thread: by device type whether it is on and its type, and whether casts of weights are kept.

    Attributes:
        types: (device type, whether autocast is on there, type of its casts).
        keeps_casts: whether casts of weights are kept until it is left.
    """

    types: tuple[tuple[str, bool, torch.dtype], ...]
    keeps_casts: bool


def autocast_state() -> AutocastState:
    """Autocast of this thread."""
    return AutocastState(
        tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _autocast_kinds()),
        torch.is_autocast_cache_enabled(),
    )


@contextlib.contextmanager
def with_autocast_state(state: AutocastState) -> Iterator[None]:
    """Inside, autocast of this thread is as in `state`.

    Args:
        state: of another thread, say.
    """
    before = autocast_state()
    _set_autocast(state)
    try:
        yield
    finally:
        _set_autocast(before)


@contextlib.contextmanager
def casts_kept() -> Iterator[None]:
    """Inside, leaving autocast does not drop its casts of weights; leaving this does not either.

    Torch drops the casts of all threads whenever one thread leaves its outermost autocast.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()


def drop_casts() -> None:
    """Drop autocast's casts of weights."""
    torch.clear_autocast_cache()


def dispatch_modes() -> list[Any]:
    """The torch dispatch modes that are active in this thread, innermost last."""
    return list(_python_dispatch._get_current_dispatch_mode_stack())


@contextlib.contextmanager
def with_modes(function_modes: Sequence[overrides.TorchFunctionMode], dispatch_modes: Sequence[Any]) -> Iterator[None]:
    """Inside, modes of another thread are active in this one.

    Args:
        function_modes: the innermost last.
        dispatch_modes: the innermost last.
    """
    for mode in dispatch_modes:
        _python_dispatch._push_mode(mode)
    for function_mode in function_modes:
        overrides._push_mode(function_mode)
    try:
        yield
    finally:
        for _ in function_modes:
            overrides._pop_mode()
        for _ in dispatch_modes:
            _python_dispatch._pop_mode()


def saved_tensor_hooks() -> list[Hooks]:
    """The default hooks for saved tensors that are active in this thread, innermost last."""
    autograd: Any = torch._C._autograd
    found: list[Hooks] = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        autograd._pop_saved_tensors_default_hooks()
        found.append(top)
    found.reverse()
    for pack, unpack in found:
        autograd._push_saved_tensors_default_hooks(pack, unpack)
    return found


def _autocast_kinds() -> list[str]:
    kinds = ["cpu", "cuda"]
    name = private_backend_name()
    return [*kinds, name] if hasattr(torch, name) else kinds


def _set_autocast(state: AutocastState) -> None:
    for kind, is_on, dtype in state.types:
        torch.set_autocast_enabled(kind, is_on)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(state.keeps_casts)
