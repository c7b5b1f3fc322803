"""Private names of torch's one free device type, its optimizers and its table of FLOPs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils, backend_registration
from torch.utils.flop_counter import flop_registry

NEWEST_TESTED_TORCH = (2, 13)


_torch_is_checked = False


def warn_if_torch_is_untested() -> None:
    """Warn, once a process, if torch is newer than the newest release that the private names here were tested with."""
    global _torch_is_checked
    if _torch_is_checked:
        return
    _torch_is_checked = True
    installed = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if installed > NEWEST_TESTED_TORCH:
        newest = ".".join(map(str, NEWEST_TESTED_TORCH))
        warnings.warn(
            f"torch {torch.__version__} is newer than {newest}, the newest release that autobalance was tested with. "
            f"If anything fails, try `pip install 'torch=={newest}.*'` or a newer autobalance.",
            stacklevel=2,
        )


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations of one operator call, by torch's own formulas; 0 for an operator that has none.

    Args:
        func: the operator overload.
        args, kwargs, result: of the call.
    """
    formula = flop_registry.get(getattr(func, "_overloadpacket", None))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def private_backend_name() -> str:
    """Name of torch's one free device type: "privateuseone" until a backend takes it."""
    return str(torch._C._get_privateuse1_backend_name())


def register_python_backend(name: str, module: Any, before_guard: Callable[[], None]) -> None:
    """Give torch's free device type to a backend that is written in Python, for the rest of the process.

    Args:
        name: of the device type.
        module: becomes `torch.<name>`; its `is_available` answers for the accelerator.
        before_guard: called whenever torch asks for the type of the device, which it does with errors pending.
    """
    private = torch._C._autograd.DeviceType.PrivateUse1

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            before_guard()
            return private

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return bool(module.is_available())

        def has_primary_context(self, device_index: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    backend_registration._setup_privateuseone_for_python_backend(
        name, backend_module=module, hook=Hooks(), device_guard=Guard()
    )


PRIVATE_BACKEND_KEYS = ("PrivateUse1", "AutocastPrivateUse1")
"""Dispatch keys, as `torch.library` names them, of torch's one free device type and of its autocast."""


@contextlib.contextmanager
def foreach_on_fakes() -> Iterator[None]:
    """Let optimizers and gradient clipping choose their foreach form for fakes as for what those stand for."""
    added = [types for types in _foreach_types() if FakeTensor not in types]
    for types in added:
        types.append(FakeTensor)
    try:
        yield
    finally:
        for types in added:
            types.remove(FakeTensor)


def support_foreach(cls: Any) -> None:
    """Let optimizers and gradient clipping choose their foreach form by default for parameters of class `cls`."""
    for types in _foreach_types():
        types.append(cls)


def _foreach_types() -> tuple[list[Any], ...]:
    """Classes of tensors that optimizers, and gradient clipping, work on by lists."""
    return optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types


def make_stream(cls: type[Any], index: int, number: int) -> Any:
    """A stream of class `cls`, which derives from `torch.Stream`, on a device of torch's one free type.

    Args:
        cls: of the stream.
        index: of the device.
        number: of the stream.
    """
    private = torch._C._autograd.DeviceType.PrivateUse1
    return torch.Stream.__new__(cls, stream_id=number, device_index=index, device_type=private.value)
