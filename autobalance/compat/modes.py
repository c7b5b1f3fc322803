"""Private names of torch's modes, autograd and autocast."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from traceback import walk_tb
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch, checkpoint

from autobalance.compat.backend import private_backend_name


class DispatchMode(_python_dispatch.TorchDispatchMode):
    """Base of modes whose `__torch_dispatch__` sees every operator while they are active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch declares no types for it


def remove_function_mode(mode: overrides.TorchFunctionMode) -> int | None:
    """Take `mode` off the stack of torch function modes, wherever it is.

    Args:
        mode: an entered torch function mode.

    Returns:
        The number of modes above it, for `insert_function_mode`; None if it is not on the stack.
    """
    above = []
    found = False
    while function_modes() and not found:
        top = overrides._pop_mode()
        found = top is mode
        if not found:
            above.append(top)
    for other in reversed(above):
        overrides._push_mode(other)
    return len(above) if found else None


def insert_function_mode(mode: overrides.TorchFunctionMode, above: int) -> None:
    """Put `mode` back below the `above` topmost torch function modes.

    Args:
        mode: one that `remove_function_mode` has taken off.
        above: what that returned.
    """
    others = [overrides._pop_mode() for _ in range(above)]
    overrides._push_mode(mode)
    for other in reversed(others):
        overrides._push_mode(other)


def function_modes() -> list[overrides.TorchFunctionMode]:
    """The torch function modes that are active in this thread, innermost last."""
    return list(overrides._get_current_function_mode_stack())


def autocast_keeps_casts() -> bool:
    """Whether autocast is entered and keeps casts of weights until its end; inside an operation it seems to be off."""
    torch.autocast_increment_nesting()
    return bool(torch.autocast_decrement_nesting() > 0) and torch.is_autocast_cache_enabled()


def call_at_checkpoint(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have activation checkpointing, for the rest of the process, run `wrap(function)` for each function it is given.

    The function runs again in backward, when the modes that were active around the forward are no longer.

    Args:
        wrap: a function of a module, asked at each checkpoint, after those given before; given again, it is asked once.
    """
    wraps_at_checkpoint: list[Any] = checkpoint.__dict__.setdefault("_wrapped_by_autobalance", [])
    if wrap in wraps_at_checkpoint:
        return
    wraps_at_checkpoint.append(wrap)
    if len(wraps_at_checkpoint) > 1:  # torch is ready for it
        return

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        for each in wraps_at_checkpoint:
            function = each(function)
        return function

    plain_generator, plain_function = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction

    @wraps(plain_generator)
    def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return plain_generator(wrapped(fn), *args, **kwargs)

    class CheckpointFunction(plain_function):  # type: ignore[misc, valid-type]  # torch declares no type for it
        @classmethod
        def apply(cls, run_function: Callable[..., Any], *args: Any) -> Any:
            return super().apply(wrapped(run_function), *args)

    checkpoint._checkpoint_without_reentrant_generator = generator
    checkpoint.CheckpointFunction = CheckpointFunction  # type: ignore[misc]  # a class is not meant to be replaced


def current_node() -> Any:
    """The autograd node that a backward in this thread is at, None outside of any."""
    return torch._C._current_autograd_node()


def number_of(node: Any) -> int:
    """Number of an autograd node, which no other node of the graph has.

    Args:
        node: such as a tensor's `grad_fn`.
    """
    number: int = node._sequence_nr()
    return number


def next_number() -> int:
    """The number that the next autograd node of this thread will have."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def is_node_of(node: Any, function: type[torch.autograd.Function]) -> bool:
    """Whether an autograd node is of this function.

    Args:
        node: such as a tensor's `grad_fn`.
        function: as the user or this package defines it.
    """
    return getattr(node, "_forward_cls", None) is function


def in_functional_transform() -> bool:
    """Whether a transform of torch.func, such as vmap or grad, is at work in this thread."""
    return bool(torch._C._are_functorch_transforms_active())


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return current_node() is not None


def accumulates_gradients(
    func: Any, args: Any, kwargs: Any, adds_nothing: Callable[[Any], bool] = lambda node: False
) -> bool:
    """Whether it is autograd itself that adds two gradients, and not the backward of an operation.

    Args:
        func, args, kwargs: the operation that runs.
        adds_nothing: whether a node is of a function of our own that adds nothing itself.
    """
    if func is not torch.ops.aten.add.Tensor or len(args) != 2 or kwargs or torch.is_grad_enabled():
        return False
    node = current_node()
    if isinstance(node, torch.autograd.function.BackwardCFunction):  # it is still current when what it gave is added
        return adds_nothing(node)
    return node is not None


@contextlib.contextmanager
def excluded_autocast() -> Iterator[None]:
    """Inside, autocast of torch's one free device type leaves operations alone."""
    with torch._C._ExcludeDispatchKeyGuard(_PRIVATE_AUTOCAST):
        yield


_keys: Any = torch._C.DispatchKey  # torch's own stubs list only some of them


_PRIVATE_AUTOCAST = torch._C.DispatchKeySet(_keys.AutocastPrivateUse1)


def on_autocast_exit(clear: Callable[[], None]) -> None:
    """Call `clear` whenever torch drops its cache of cast weights, which is when the outermost autocast exits.

    Args:
        clear: called after torch has dropped it.
    """
    clear_torchs = torch.clear_autocast_cache

    @wraps(clear_torchs)
    def clear_both() -> None:
        clear()
        clear_torchs()

    torch.clear_autocast_cache = clear_both


@contextlib.contextmanager
def dispatching_to_python() -> Iterator[None]:
    """Inside, tensor subclasses and dispatch modes see operations even where torch hides them, as in `torch.tensor`."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude - _PYTHON):
        yield


_PYTHON = torch._C.DispatchKeySet(torch._C.DispatchKey.Python) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.PythonTLSSnapshot
)


def single_threaded_backward(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let every backward of this process run in the thread that asks for it, save those of CUDA.

    A Python backend counts as one device in torch, so the engine has no thread for its further devices.

    Args:
        around: makes of the engine the function that is called instead.
    """
    autograd: Any = torch.autograd
    engine = around(autograd._engine_run_backward)

    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        name = private_backend_name()
        on_backend = (isinstance(output, torch.Tensor) and output.device.type == name for output in outputs)
        if torch.cuda.is_initialized() and not any(on_backend):
            return engine(outputs, *args, **kwargs)
        with torch.autograd.set_multithreading_enabled(False):
            return engine(outputs, *args, **kwargs)

    autograd._engine_run_backward = run


def call_around_backward(context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Have every backward, for the rest of the process, run inside `context()`.

    Args:
        context: a function of a module, asked at each backward; given again, it is not entered twice.
    """
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward
    if hasattr(autograd, "_context_of_autobalance"):
        return

    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return engine(*args, **kwargs)

    autograd._engine_run_backward = run
    autograd._context_of_autobalance = context


def modes_disabled() -> contextlib.AbstractContextManager[Any]:
    """A context in which no dispatch mode is active, for work on real tensors in the middle of a trace."""
    disabled: contextlib.AbstractContextManager[Any] = _python_dispatch._disable_current_modes()
    return disabled


def raised_in_backward(error: BaseException) -> bool:
    """Whether an error comes from a backward.

    Args:
        error: with its traceback.
    """
    return any(frame.f_code.co_name == "_engine_run_backward" for frame, _ in walk_tb(error.__traceback__))


def saved_tensor_hooks_are_active() -> bool:
    """Whether what operations save for their backward goes through hooks, as under activation checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextlib.contextmanager
def unseen_by_transformers() -> Iterator[None]:
    """Inside, transformers takes fake tensors for the tensors they stand for, not for a graph that is being captured.

    It would make masks that the real run goes without, and repeat keys and values that the real run shares.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    name = "is_fake_tensor"
    if module is None or not hasattr(module, name):  # releases before 5 do not ask
        yield
        return
    before = vars(module)[name]
    setattr(module, name, lambda value: False)
    try:
        yield
    finally:
        setattr(module, name, before)
