"""State that torch and others keep by thread, carried from the thread of the training loop into others."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import ExitStack

import torch

from autobalance import compat


class Carried:
    """The thread-local state of one thread, to run code with it in another.

    Covers grad and inference mode, autocast, torch function and dispatch modes (`torch.device` as a context is one of
    them), default saved-tensor hooks, autograd's own threading, the current device and streams, and context variables.
    Default dtype, deterministic flags and anomaly detection are the process's, and need no carrying; what a call sets
    of them, `ProcessState` keeps from the others.

    Example:
        >>> carried = carried_state()
        >>> threading.Thread(target=carried.run, args=(step,)).start()      # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autograd_threads = compat.autograd_uses_threads()
        self._autocast = compat.autocast_state()
        self._function_modes = compat.function_modes()
        self._dispatch_modes = compat.dispatch_modes()
        self._saved_tensor_hooks = compat.saved_tensor_hooks()
        self._streams = _cuda_streams()
        self._device = torch.cuda.current_device() if self._streams else None

    def run(self, call: Callable[[], object]) -> None:
        """Run `call` with this state; once, in a thread whose own state is of no further use."""
        self._context.run(self._run, call)

    def _run(self, call: Callable[[], object]) -> None:
        for stream in self._streams:
            torch.cuda.set_stream(stream)
        if self._device is not None:
            torch.cuda.set_device(self._device)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            stack.enter_context(torch.autograd.set_multithreading_enabled(self._autograd_threads))
            stack.enter_context(compat.with_autocast_state(self._autocast))
            for pack, unpack in self._saved_tensor_hooks:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
            stack.enter_context(compat.with_modes(self._function_modes, self._dispatch_modes))
            call()


def carried_state() -> Carried:
    """The state of this thread, as it is now."""
    return Carried()


def _cuda_streams() -> list[torch.cuda.Stream]:
    """The current stream of every GPU; none where CUDA is not in use."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())]
