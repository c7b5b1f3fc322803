"""Entry points for operations that reach the device type without a simulated tensor among their operands: factories."""

from __future__ import annotations

from typing import Any

import torch

from autobalance import compat
from autobalance.simulated import backend, elements
from autobalance.simulated.dispatch import run

_aten = torch.ops.aten
_libraries: list[torch.library.Library] = []


def register() -> None:
    """Register the kernels with torch; once a process."""
    key, _ = backend.dispatch_keys()
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("empty.memory_format", _empty, key)
    aten.impl("empty_strided", _empty_strided, key)
    aten.impl("_copy_from", _copy_from, key)
    everything_else = torch.library.Library("_", "IMPL")
    everything_else.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), key)
    _libraries.extend((aten, everything_else))  # a library unregisters its kernels when it dies


def _empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Any:
    options = {"dtype": dtype, "device": device or torch.device(backend.NAME), "memory_format": memory_format}
    return _run(_aten.empty.memory_format, (size,), options)


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    return _run(
        _aten.empty_strided.default, (size, stride), {"dtype": dtype, "device": device or torch.device(backend.NAME)}
    )


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    return _run(_aten.copy_.default, (target, source), {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    if elements.fake_mode is None:
        return run(func, args, kwargs)
    with compat.dispatching_to_python():  # fakes are made by a dispatch mode
        return run(func, args, kwargs)
