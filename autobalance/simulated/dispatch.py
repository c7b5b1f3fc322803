"""Carries out one operation on simulated tensors: on their elements, with the errors and the bookkeeping of a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autobalance import compat
from autobalance.simulated import backend, elements, ledger, tensor
from autobalance.simulated.operation import Operation, describe
from autobalance.simulated.tensor import SimulatedTensor

_aten = torch.ops.aten
_CPU = torch.device("cpu")
_NON_FINITE_CHECK = _aten._amp_foreach_non_finite_check_and_unscale_.default

observer: Callable[[Any, Any, Any, Any, int | None], None] | None = None
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
def observing(observe: Callable[[Any, Any, Any, Any, int | None], None]) -> Iterator[None]:
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
    special = special_cases.get(func)
    if special is not None:
        return special(func, args, kwargs)
    return Call(func, args, kwargs).run(func)


def emulate(func: Any, kernel: Callable[..., Any]) -> None:
    """Let `kernel` on elements stand in for an operator that the CPU does not have."""
    special_cases[func] = lambda func, args, kwargs: Call(func, args, kwargs).run(kernel)


class Call:
    """One operation under way: its operands, and where its results belong."""

    __slots__ = ("args", "first", "func", "host_operand", "index", "kwargs", "lists", "operation", "stranger", "wrappers")

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func = func
        self.operation: Operation = describe(func)
        self.args = args
        self.kwargs = kwargs
        self.first: SimulatedTensor | None = None
        self.index: int | None = None
        self.lists: list[SimulatedTensor] | None = None
        self.stranger: torch.Tensor | None = None
        self.host_operand: torch.Tensor | None = None
        self.wrappers: dict[int, SimulatedTensor] = {}

    def run(self, kernel: Any) -> Any:
        self._find_device()
        if elements.fake_mode is None:
            args, kwargs = self._translated(self._elements)
            result = self._wrapped(kernel(*args, **kwargs))
        else:
            result = self._run_on_fakes(kernel)
        if observer is not None:
            observer(self.func, self.args, self.kwargs, result, None if self.first is None else self.first.account)
        return result

    # Operands

    def _find_device(self) -> None:
        """Find the first simulated operand, check that no other is elsewhere, and see where results belong."""
        operation = self.operation
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, torch.Tensor):
                self._see(value, operation.moves or operation.reads_host)
            elif type(value) in (list, tuple) and value and isinstance(value[0], (torch.Tensor, type(None))):
                if operation.by_element:
                    self._check_list(value)
                    continue
                for item in value:
                    if isinstance(item, torch.Tensor):
                        self._see(item, operation.indexed)
        if self.index is not None and self.first is not None:
            stranger = self.stranger if self.stranger is not None else self.host_operand
            if stranger is not None:
                self._refuse(self.first.device, stranger.device)
        where = self.kwargs.get("device")
        if where is not None:
            self.index = backend.index_of(where) if where.type == backend.NAME else None

    def _see(self, value: torch.Tensor, host_is_welcome: bool) -> None:
        """Take one operand into account; as on CUDA, a scalar of the host may join any device."""
        simulated = isinstance(value, SimulatedTensor)
        index = value.index if simulated else None
        if index is None:
            if simulated and self.first is None:
                self.first = value
            if not host_is_welcome and value.dim() > 0:
                self.host_operand = value
        elif self.index is None:
            self.first, self.index = value, index
        elif index != self.index and not self.operation.moves:
            self.stranger = value

    def _check_list(self, items: Any) -> None:
        """Operations on lists work element by element: only equal positions must be on one device."""
        if self.lists is None:
            self.lists = items
            for item in items:
                if isinstance(item, SimulatedTensor):
                    self.first, self.index = item, item.index
                    break
            return
        for one, other in zip(self.lists, items, strict=False):
            if other.device != one.device and other.dim() > 0:
                self._refuse(one.device, other.device)

    def _refuse(self, one: torch.device, other: torch.device) -> None:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {one} and {other}! "
            f"(when checking the arguments of {self.operation.name})"
        )

    def _translated(self, translate: Callable[[torch.Tensor], Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments with every tensor replaced by `translate(tensor)`, and every simulated device by the CPU."""
        args = [self._translate(value, translate) for value in self.args]
        kwargs = self.kwargs
        if kwargs:
            kwargs = {name: self._translate(value, translate) for name, value in kwargs.items()}
            where = kwargs.get("device")
            if where is not None and where.type == backend.NAME:
                kwargs["device"] = _CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return args, kwargs

    def _translate(self, value: Any, translate: Callable[[torch.Tensor], Any]) -> Any:
        if isinstance(value, torch.Tensor):
            return translate(value)
        if type(value) in (list, tuple):
            return [self._translate(item, translate) for item in value]
        return value

    def _elements(self, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, SimulatedTensor):
            return value
        inner = value.elements
        self.wrappers[id(inner)] = value
        return inner

    def _fake_elements(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, SimulatedTensor):
            inner = elements.fake_elements_of(value)
            self.wrappers[id(inner)] = value
            return inner
        return value if compat.is_fake(value) else elements.fake_like(value)

    # Results

    def _wrapped(self, result: Any) -> Any:
        """The results as simulated tensors; what an operand is already is returned as that operand."""
        operation = self.operation
        if isinstance(result, torch.Tensor):
            returned = operation.returns[0] if operation.returns else None
            result = self._operand(returned) if returned is not None else self._wrap(result, 0)
        elif isinstance(result, (list, tuple)):
            result = self._wrapped_list(result)
        if operation.reshapes:
            self._follow_reshape()
        return result

    def _wrapped_list(self, results: Any) -> Any:
        returns = self.operation.returns
        one_list = len(returns) == 1
        wrapped: list[Any] = []
        try:
            for position, item in enumerate(results):
                returned = None if one_list else returns[position]
                if returned is not None:
                    item = self._operand(returned)
                elif isinstance(item, torch.Tensor):
                    item = self._wrap(item, position)
                elif isinstance(item, (list, tuple)):
                    item = type(item)(self._wrap(part, place) for place, part in enumerate(item))
                wrapped.append(item)
        except torch.OutOfMemoryError:
            wrapped.clear()  # the traceback would keep what was counted before the failure
            raise
        return wrapped if isinstance(results, list) else tuple(wrapped)

    def _operand(self, returned: tuple[int, str]) -> Any:
        position, name = returned
        return self.args[position] if position < len(self.args) else self.kwargs[name]

    def _wrap(self, value: torch.Tensor, position: int) -> Any:
        known = self.wrappers.get(id(value))
        if known is not None:
            return known
        source = self.first
        index = self.index
        if self.lists is not None and position < len(self.lists):
            item = self.lists[position]
            if not isinstance(item, SimulatedTensor):
                return value
            source, index = item, item.index
        if index is None and not compat.is_fake(value):
            return value
        if value.is_complex() and value.is_conj():
            value = value.resolve_conj()  # the wrapper does not carry torch's lazy conjugation
        account = None
        if ledger.is_tracing():
            account = source.account if source is not None and source.index == index else current_account
        return SimulatedTensor(value, index, account)

    def _follow_reshape(self) -> None:
        """Let the sizes and the counted bytes of written operands follow their elements."""
        for position, name in self.operation.writes:
            operand = self.args[position] if position < len(self.args) else self.kwargs.get(name)
            for written in operand if isinstance(operand, (list, tuple)) else (operand,):
                if isinstance(written, SimulatedTensor):
                    tensor.follow_elements(written)

    # Fakes

    def _run_on_fakes(self, kernel: Any) -> Any:
        values = self._known_operands()
        operation = self.operation
        if operation.shaped_by_data and values is not None:
            real = kernel(*values[0], **values[1])
            result = self._wrapped(_map_tensors(real, elements.fake_like))
        else:
            args, kwargs = self._translated(self._fake_elements)
            if operation.indexed and len(args) > 1:
                args[1] = [self._as_positions(index) for index in self.args[1]]
                args[1] = [part for parts in args[1] for part in parts]
            with elements.fake_mode:
                fakes = kernel(*args, **kwargs)
            result = self._wrapped(fakes)
            real = None
            if values is not None and not operation.random and self._results_are_small(fakes):
                real = kernel(*values[0], **values[1])
        self._keep_known(result, real, values is not None and not operation.random)
        return result

    def _known_operands(self) -> tuple[list[Any], dict[str, Any]] | None:
        """The arguments with real values in place of tensors; None if one of them is not known."""
        missing = False

        def real(value: torch.Tensor) -> torch.Tensor | None:
            nonlocal missing
            known = elements.known_of(value)
            missing = missing or known is None
            return known

        translated = self._translated(real)
        return None if missing else translated

    def _results_are_small(self, fakes: Any) -> bool:
        items = fakes if isinstance(fakes, (list, tuple)) else (fakes,)
        return all(elements.is_small(item) for item in items if isinstance(item, torch.Tensor))

    def _keep_known(self, result: Any, real: Any, written_is_known: bool) -> None:
        """Keep real values beside new results, and forget what was overwritten by something unknown."""
        if self.operation.writes and (real is None or not written_is_known):
            for position, name in self.operation.writes:
                if self.func is _NON_FINITE_CHECK and name == "found_inf":
                    continue  # unknown gradients are taken as finite: a loss scaler must not skip the step
                operand = self.args[position] if position < len(self.args) else self.kwargs.get(name)
                for written in operand if isinstance(operand, (list, tuple)) else (operand,):
                    if isinstance(written, SimulatedTensor):
                        elements.forget(elements.fake_elements_of(written))
        if real is None:
            return
        if isinstance(result, SimulatedTensor):
            result, real = (result,), (real,)
        if isinstance(result, (list, tuple)):
            for wrapper, value in zip(result, real, strict=False):
                if isinstance(wrapper, SimulatedTensor) and isinstance(value, torch.Tensor):
                    elements.remember(wrapper, wrapper.elements, value)

    def _as_positions(self, index: Any) -> list[Any]:
        """Indices of an indexing operation as fakes; a boolean mask whose value is known as the positions it selects."""
        if index is None:
            return [None]
        if index.dtype in (torch.bool, torch.uint8):
            mask = elements.known_of(index)
            if mask is not None:
                return [elements.fake_like(position) for position in mask.nonzero(as_tuple=True)]
        return [self._fake_elements(index)]


def _map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(item, function) for item in value)
    return value


def _item(func: Any, args: Any, kwargs: Any) -> Any:
    """The number in a tensor of one element."""
    (value,) = args
    if elements.fake_mode is None and not compat.is_fake(value.elements):
        return func(value.elements)
    if value.known is not None:
        return func(value.known)
    if not compat.is_fake(value.elements):
        return func(value.elements)
    return elements.placeholder(value.elements)


def _resize(func: Any, args: Any, kwargs: Any) -> Any:
    """Refuse a growth that does not fit before anything is changed."""
    target, size = args[0], args[1]
    wanted = target.elements.itemsize * (target.elements.storage_offset() + _product(size))
    ledger.reserve(target.elements.untyped_storage(), wanted, target.account)
    return Call(func, args, kwargs).run(func)


def _product(sizes: Any) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


special_cases: dict[Any, Callable[[Any, Any, Any], Any]] = {
    _aten._local_scalar_dense.default: _item,
    _aten.resize_.default: _resize,
    _aten.record_stream.default: lambda func, args, kwargs: None,
}
"""Operators that are carried out in another way."""

tensor.run = run
