"""Real values beside small fakes, so that shapes and branches that depend on them are those of the real run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autobalance import compat
from autobalance.profiling.operands import operands_in
from autobalance.simulated.bounds import bounded, bounded_positions
from autobalance.simulated.elements import is_small
from autobalance.simulated.guesses import guess
from autobalance.simulated.operation import OVERWRITES, READS_SHAPES_ONLY

_aten = torch.ops.aten
_INDEXED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)
_NUMBER = (_aten._local_scalar_dense.default, _aten.item.default)
_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_NON_FINITE_CHECK = _aten._amp_foreach_non_finite_check_and_unscale_.default


class _Cell:
    """What is known of one storage; shared by the views of it."""

    __slots__ = ("__weakref__", "guessed", "holds")

    def __init__(self) -> None:
        self.holds = True
        self.guessed = False


class _Known(NamedTuple):
    value: Tensor
    cell: _Cell


class KnownValues(compat.DispatchMode):
    """Keeps the real values of small fakes, so that `.item()` and `if` on a mask work.

    Args:
        mode: makes fakes, and carries operations out on them.
        note: told of each number that nobody knows and a placeholder stands for: "float", or "choice" where what
            follows depends on which of several was chosen.
    """

    def __init__(self, mode: Any, note: Callable[[str], None]) -> None:
        super().__init__()
        self._mode = mode
        self._note = note
        self._values = WeakIdKeyDictionary()
        self._cells: WeakValueDictionary[int, _Cell] = WeakValueDictionary()

    def remember(self, fake: Tensor, value: Tensor, guessed: bool = False) -> None:
        """Keep `value`, a CPU tensor, for `fake` if it is small.

        Args:
            fake: the tensor without numbers.
            value: its numbers.
            guessed: whether they are only what they might be.
        """
        if not is_small(value):
            return
        key = compat.storage_key(value.untyped_storage())
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = _Cell()
        cell.guessed |= guessed
        self._values[fake] = _Known(value, cell)

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """The real value of `tensor`, None where it is not known."""
        if not compat.is_fake(tensor):
            return tensor if tensor.device.type == "cpu" else None
        known: _Known | None = self._values.get(tensor)
        if known is None:
            return compat.constant_of(tensor)
        return known.value if known.cell.holds else None

    def _is_guessed(self, tensor: Tensor) -> bool:
        known: _Known | None = self._values.get(tensor)
        return known is not None and known.cell.guessed

    def _forget(self, tensor: Tensor) -> None:
        """Something unknown was written to it, and so to all that share its storage."""
        known: _Known | None = self._values.pop(tensor, None)
        if known is not None:
            known.cell.holds = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NUMBER:
            return self._number(func, args[0])
        made_up = (func in OVERWRITES or func in READS_SHAPES_ONLY) and self._make_up(args[0])
        result = self._carry_out(func, args, kwargs)
        if made_up and func in READS_SHAPES_ONLY:
            self._values.pop(args[0], None)
        return result

    def _carry_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        operands = list(operands_in((args, kwargs)))
        known = torch.Tag.nondeterministic_seeded not in func.tags and "empty" not in func.__name__
        known = known and all(self.value_of(operand) is not None for operand in operands)
        guessed = known and any(map(self._is_guessed, operands))
        if not _DEPENDENT.isdisjoint(func.tags):
            if known:
                return self._run_for_real(func, args, kwargs, guessed)
            if func is _aten.masked_select.default and self.value_of(args[1]) is not None:
                return self._masked_select(*args)
            at_most = bounded(func)
            if at_most is not None:
                return at_most(*args, **kwargs)
        result = func(*self._with_positions(func, args), **kwargs)
        if known and all(map(is_small, operands_in([result]))):
            self._keep(result, self._real(func, args, kwargs), guessed)
        else:
            self._forget_written(func, args, kwargs)
            chosen = guess(func, args, kwargs, result)
            for fake, value in zip(operands_in([result]), chosen, strict=False):
                if value is not None:
                    self.remember(fake, value, guessed=True)
        return result

    def _make_up(self, operand: Tensor) -> bool:
        """Give an unknown operand numbers that the result does not depend on; whether that was needed."""
        if self.value_of(operand) is not None or not is_small(operand):
            return False
        with compat.modes_disabled():
            self.remember(operand, torch.zeros(operand.shape, dtype=operand.dtype))
        return True

    def _number(self, func: Any, tensor: Tensor) -> Any:
        known = self.value_of(tensor)
        if known is not None:
            if self._is_guessed(tensor):
                self._note("choice")
            with compat.modes_disabled():
                return known.item()
        if not tensor.is_floating_point():
            return func(tensor)
        self._note("float")
        return 1.0

    def _real(self, func: Any, args: Any, kwargs: Any) -> Any:
        real_args, real_kwargs = _map((args, kwargs), self.value_of)
        if real_kwargs.get("device") is not None:
            real_kwargs["device"] = torch.device("cpu")
        with compat.modes_disabled():
            return func(*real_args, **real_kwargs)

    def _run_for_real(self, func: Any, args: Any, kwargs: Any, guessed: bool) -> Any:
        """Carry out an operation whose shapes depend on numbers on those numbers."""
        if guessed:
            self._note("choice")
        device = next(operand.device for operand in operands_in((args, kwargs)))
        real = self._real(func, args, kwargs)
        result = _map(real, lambda value: self._fake_like(value, device))
        self._keep(result, real, guessed)
        return result

    def _fake_like(self, value: Tensor, device: torch.device) -> Tensor:
        with self._mode:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)

    def _keep(self, result: Any, real: Any, guessed: bool) -> None:
        for fake, value in zip(operands_in([result]), operands_in([real]), strict=False):
            self.remember(fake, value, guessed)

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for position, name in compat.written_by(func):
            # Unknown gradients are taken as finite: a loss scaler must not skip the step.
            if func is _NON_FINITE_CHECK and name == "found_inf":
                continue
            written = args[position] if position < len(args) else kwargs.get(name)
            for tensor in operands_in([written]):
                self._forget(tensor)

    def _with_positions(self, func: Any, args: Any) -> Any:
        """The arguments with boolean indices whose values are known as the positions that they select."""
        if func not in _INDEXED:
            return args
        indices: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            known = self.value_of(index)
            at_most = bounded_positions(index) if known is None else self._positions(index, known)
            indices += at_most or [index]
        return (args[0], indices, *args[2:])

    def _positions(self, mask: Tensor, known: Tensor) -> list[Tensor]:
        if self._is_guessed(mask):
            self._note("choice")
        with compat.modes_disabled():
            positions = known.nonzero(as_tuple=True)
        return [self._fake_like(position, mask.device) for position in positions]

    def _masked_select(self, value: Tensor, mask: Tensor) -> Tensor:
        known = self.value_of(mask)
        assert known is not None
        shape = torch.broadcast_shapes(value.shape, known.shape)
        with compat.modes_disabled():
            known = known.expand(shape)
        return value.expand(shape)[tuple(self._positions(mask, known))]


def _map(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, function) for item in value)
    if isinstance(value, dict):
        return {key: _map(item, function) for key, item in value.items()}
    return value
