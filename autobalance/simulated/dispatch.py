"""Carries out one operation on simulated tensors: on their elements, with a device's errors and bookkeeping."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from autobalance import compat
from autobalance.simulated import backend, clock, elements, fakes, ledger, tensor
from autobalance.simulated.operands import Operands
from autobalance.simulated.operation import describe
from autobalance.simulated.tensor import SimulatedTensor
from autobalance.simulated.ticks import tick

_aten = torch.ops.aten
_CPU = torch.device("cpu")
Observe = Callable[[Any, Any, Any, Any, "int | None"], None]

observer: Observe | None = None
"""Called as `observer(func, args, kwargs, result, account)` after each operation on simulated tensors."""

current_account: int | None = None
"""Account of tensors made without an operand, while a ledger of its own is told; None: the device's index."""


@contextlib.contextmanager
def charging(account: int | None) -> Iterator[None]:
    """Charge tensors that are made from nothing, or come from the host, to `account` inside `using_ledger`."""
    global current_account
    before, current_account = current_account, account
    try:
        yield
    finally:
        current_account = before


@contextlib.contextmanager
def observing(observe: Observe) -> Iterator[None]:
    """Call `observe(func, args, kwargs, result, account)` after each operation on simulated tensors inside."""
    global observer
    before, observer = observer, observe
    try:
        yield
    finally:
        observer = before


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Carry out `func` on its operands' elements.

    Args:
        func: an operator overload, such as `torch.ops.aten.add.Tensor`.
        args: its positional arguments, simulated and other tensors among them.
        kwargs: its keyword arguments.

    Returns:
        What the operator returns, as simulated tensors on the operands' device.

    Raises:
        RuntimeError: operands are on different devices.
        torch.OutOfMemoryError: a result does not fit on its device.
    """
    return carrier_of(func)(func, args, kwargs)


def carrier_of(func: Any) -> Callable[[Any, Any, Any], Any]:
    """The function, on simulated tensors, that carries out an operator."""
    return _special_cases.get(id(func), _as_it_is)


def _as_it_is(func: Any, args: Any, kwargs: Any) -> Any:
    return Call(func, args, kwargs).run(func)


_special_cases: dict[int, Callable[[Any, Any, Any], Any]] = {}


def carry_out(func: Any, special: Callable[[Any, Any, Any], Any]) -> None:
    """Let `special(func, args, kwargs)`, on simulated tensors, carry out an operator."""
    _special_cases[id(func)] = special  # operators live as long as torch does


def emulate(func: Any, kernel: Callable[..., Any]) -> None:
    """Let `kernel`, on elements, stand in for an operator that the CPU does not have."""
    carry_out(func, _on_elements(kernel))


def _on_elements(kernel: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    return lambda func, args, kwargs: Call(func, args, kwargs).run(kernel)


@contextlib.contextmanager
def standing_in(kernels: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Let kernels, on elements, carry out operators inside.

    Args:
        kernels: by operator overload.
    """
    with carrying_out({func: _on_elements(kernel) for func, kernel in kernels.items()}):
        yield


@contextlib.contextmanager
def carrying_out(specials: Mapping[Any, Callable[[Any, Any, Any], Any]]) -> Iterator[None]:
    """Let functions, on simulated tensors, carry out operators inside.

    Args:
        specials: as for `carry_out`, by operator overload.
    """
    before = {id(func): _special_cases.get(id(func)) for func in specials}
    for func, special in specials.items():
        carry_out(func, special)
    try:
        yield
    finally:
        for key, carrier in before.items():
            if carrier is None:
                del _special_cases[key]
            else:
                _special_cases[key] = carrier


class Call:
    """One operation under way.

    Args:
        func: the operator overload.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        RuntimeError: operands are on different devices.
    """

    __slots__ = ("_wrappers", "args", "func", "kwargs", "operands", "operation")

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.operation = describe(func)
        self.operands = Operands(self.operation, args, kwargs)
        self._wrappers: dict[int, SimulatedTensor] = {}

    def run(self, kernel: Callable[..., Any]) -> Any:
        """Carry the operation out, by `kernel` on elements."""
        if elements.fake_mode is None:
            args, kwargs = self._on_elements()
            result = self.wrapped(kernel(*args, **kwargs))
        else:
            result = fakes.run(self, kernel)
        if observer is not None:
            first = self.operands.first
            observer(self.func, self.args, self.kwargs, result, None if first is None else first.account)
        hands = clock.running()
        if hands is not None:
            tick(hands, self, result)
        return result

    def translated(self, translate: Callable[[torch.Tensor], Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with every tensor replaced by `translate(tensor)`, and every simulated device by the CPU."""
        args = [_map_tensors(value, translate) for value in self.args]
        if not self.kwargs:
            return args, {}
        kwargs = {name: _map_tensors(value, translate) for name, value in self.kwargs.items()}
        where = kwargs.get("device")
        if where is not None and where.type == backend.NAME:
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return args, kwargs

    def stands_for(self, inner: torch.Tensor, wrapper: SimulatedTensor) -> None:
        """Take note that a result which is `inner` itself is `wrapper`."""
        self._wrappers[id(inner)] = wrapper

    def written(self) -> Iterator[tuple[str, SimulatedTensor]]:
        """Name and value of the simulated tensors that the operation writes to."""
        for position, name in self.operation.writes:
            value = self._argument(position, name)
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, SimulatedTensor):
                    yield name, item

    def wrapped(self, result: Any) -> Any:
        """The results as simulated tensors; what an operand is already is returned as that operand."""
        returns = self.operation.returns
        if isinstance(result, torch.Tensor):
            result = self._argument(*returns[0]) if returns[0] is not None else self._wrap(result, 0)
        elif isinstance(result, (list, tuple)):
            result = self._wrapped_list(result)
        if self.operation.reshapes:
            for _, written in self.written():
                tensor.follow_elements(written)
        return result

    def _wrapped_list(self, results: Any) -> Any:
        returns = self.operation.returns
        wrapped: list[Any] = []
        try:
            for position, item in enumerate(results):
                returned = returns[position] if len(returns) > 1 else None
                if returned is not None:
                    item = self._argument(*returned)
                elif isinstance(item, torch.Tensor):
                    item = self._wrap(item, position)
                elif isinstance(item, (list, tuple)):
                    item = type(item)(self._wrap(part, place) for place, part in enumerate(item))
                wrapped.append(item)
        except torch.OutOfMemoryError:
            wrapped.clear()  # the traceback would keep what was counted before the failure
            raise
        return wrapped if isinstance(results, list) else tuple(wrapped)

    def _argument(self, position: int, name: str) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name)

    def _wrap(self, value: torch.Tensor, position: int) -> Any:
        present = self._wrappers.get(id(value))
        if present is not None:
            return present
        source, index = self.operands.first, self.operands.index
        if self.operands.elementwise is not None and position < len(self.operands.elementwise):
            item = self.operands.elementwise[position]
            if not isinstance(item, SimulatedTensor):
                return value
            source, index = item, item.index
        if index is None and not (compat.is_fake(value) and value.is_cpu):
            return value
        if value.dtype.is_complex and value.is_conj():
            value = value.resolve_conj()  # the wrapper does not carry torch's lazy conjugation
        if not ledger.is_tracing():
            return SimulatedTensor(value, index)
        # What an operation moves to another device, or from the host, is charged there and not to whom it came from.
        account = source.account if source is not None and source.index == index else current_account
        return SimulatedTensor(value, index, account)

    def _on_elements(self) -> tuple[list[Any], dict[str, Any]]:
        """As `translated`, with each simulated tensor replaced by its elements; the path that every operation takes."""
        if self.kwargs:
            return self.translated(self._elements)
        args = []
        for value in self.args:
            if isinstance(value, SimulatedTensor):
                inner = value.elements
                self._wrappers[id(inner)] = value
                args.append(inner)
            elif isinstance(value, (list, tuple)):
                args.append(_map_tensors(value, self._elements))
            else:
                args.append(value)
        return args, {}

    def _elements(self, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, SimulatedTensor):
            return value
        self._wrappers[id(value.elements)] = value
        return value.elements


def _map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return [_map_tensors(item, function) for item in value]
    return value


def _item(func: Any, args: Any, kwargs: Any) -> Any:
    """The number in a tensor of one element."""
    (value,) = args
    return func(elements.numbers(value))


def _resize(func: Any, args: Any, kwargs: Any) -> Any:
    """Refuse a growth that does not fit before anything is changed."""
    target, sizes = args[0], args[1]
    wanted = target.elements.itemsize * target.elements.storage_offset()
    wanted += target.elements.itemsize * torch.Size(sizes).numel()
    ledger.reserve(target.elements.untyped_storage(), wanted)
    return Call(func, args, kwargs).run(func)


carry_out(_aten._local_scalar_dense.default, _item)
carry_out(_aten.resize_.default, _resize)
carry_out(_aten.record_stream.default, lambda func, args, kwargs: None)

tensor.run = run
