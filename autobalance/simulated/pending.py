"""An error that leaves a backward, brought past the device guard that autograd asks on the way.

When an operation of a backward fails, torch unwinds its C++ stack with the Python error still pending, and on that way
asks the guard of the device for its type. A Python backend answers by running Python code, which fails while an error
is pending, and the process is aborted. So the guard sets the error aside before it answers, and it is raised where the
backward was asked for.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

_kind, _error, _trace = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
_slots = ctypes.byref(_kind), ctypes.byref(_error), ctypes.byref(_trace)
_fetch = ctypes.pythonapi.PyErr_Fetch
_normalize = ctypes.pythonapi.PyErr_NormalizeException
_release = ctypes.pythonapi.Py_DecRef

_aside: list[BaseException] = []


def set_aside() -> None:
    """Take the pending error, if there is one, from the interpreter; must be the first call of a function."""
    _fetch(*_slots)
    if _kind.value is None:
        return
    _normalize(*_slots)
    error = _object_at(_error)
    trace = None if _trace.value is None else _object_at(_trace)
    for slot in (_kind, _error, _trace):
        if slot.value is not None:
            _release(ctypes.cast(slot, ctypes.py_object))
    _aside.append(error.with_traceback(trace))


def raising(engine: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs autograd's engine and raises what was set aside meanwhile.

    Args:
        engine: what `torch.autograd` calls.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        _aside.clear()
        try:
            return engine(*args, **kwargs)
        except SystemError as lost:  # all that is left of the error where it was set aside
            error: BaseException = _aside.pop(0) if _aside else lost
        except Exception as other:
            error = other
        _forget_what_was_to_come(engine)
        try:
            raise error
        finally:
            del error  # its traceback holds this frame: what the frame holds would stay until a garbage collection

    return run


def _forget_what_was_to_come(engine: Callable[..., Any]) -> None:
    """Empty this thread's queue of the nodes, with their gradients, that a failed backward has not come to.

    Torch drops them at the latest in a later backward of the thread, when they are before its own in the queue: nodes
    that were made later in their thread go first, so a graph that a new thread makes comes after all others.
    """
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.zeros((), requires_grad=True).exp()))
    thread.start()
    thread.join()
    engine(tuple(made), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _object_at(slot: ctypes.c_void_p) -> Any:
    return ctypes.cast(slot, ctypes.py_object).value
