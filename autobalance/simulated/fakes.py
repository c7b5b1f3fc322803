"""Carries out an operation on fakes, and beside it on the real values of its operands where they are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from autobalance import compat
from autobalance.simulated import elements, ledger
from autobalance.simulated.bounds import bounded, bounded_positions
from autobalance.simulated.guesses import guess
from autobalance.simulated.tensor import SimulatedTensor

if TYPE_CHECKING:
    from autobalance.simulated.dispatch import Call

_aten = torch.ops.aten
_NON_FINITE_CHECK = _aten._amp_foreach_non_finite_check_and_unscale_.default

_SAMPLING = (_aten.argmax.default, _aten.multinomial.default)

_Arguments = tuple[list[Any], dict[str, Any]]


def run(call: Call, kernel: Callable[..., Any]) -> Any:
    """Carry out one operation while elements are fake.

    Args:
        call: of an operator.
        kernel: that carries it out on elements.

    Returns:
        Simulated tensors whose elements are fakes; they are known where all that they depend on is.

    Raises:
        DynamicOutputShapeException: the shape of the result depends on unknown numbers.
    """
    known, guessed = _known_arguments(call)
    real = None
    if call.func is _aten.masked_select.default and known is None:
        kernel = _selecting(*call.args) or bounded(call.func) or kernel
    elif call.operation.needs_data and known is None:
        kernel = bounded(call.func) or kernel
    if call.operation.needs_data and known is not None:
        _tell_choice(guessed)
        real = kernel(*known[0], **known[1])
        result = call.wrapped(_fakes_like(real))
    else:
        args, kwargs = _fake_arguments(call)
        with elements.fake_mode:
            results = kernel(*args, **kwargs)
        result = call.wrapped(results)
        if known is not None and _are_small(results) and all(elements.is_small(value) for _, value in call.written()):
            real = kernel(*known[0], **known[1])
    _keep(call, result, real, guessed)
    if real is None:
        _guess(call, result)
    return result


def _guess(call: Call, result: Any) -> None:
    """Take some choice for the one that only real numbers tell; it is told once something depends on it.

    What generation samples is told at once: how many tokens there are does not depend on which.
    """
    results = result if isinstance(result, (list, tuple)) else (result,)
    chosen = guess(call.func, call.args, call.kwargs, result)
    for wrapper, value in zip(results, chosen, strict=False):
        if value is not None and isinstance(wrapper, SimulatedTensor):
            elements.remember(wrapper, _elements(wrapper), value, guessed=True)
            _tell_choice(call.func in _SAMPLING and not torch.is_grad_enabled())


def _is_guessed(value: Any) -> bool:
    return isinstance(value, SimulatedTensor) and value.known_value is not None and value.known_value.guessed


def _tell_choice(guessed: bool) -> None:
    if guessed and elements.on_placeholder is not None:
        elements.on_placeholder("choice")


def known_of(value: torch.Tensor) -> torch.Tensor | None:
    """Real value of an operand; a host tensor is its own, one on meta has none.

    Args:
        value: a fake, or on the host.
    """
    if isinstance(value, SimulatedTensor):
        if not compat.is_fake(value.elements):
            _twin(value)
        return value.known
    return None if compat.is_fake(value) or value.is_meta else value


def _known_arguments(call: Call) -> tuple[_Arguments | None, bool]:
    """The arguments with real values in place of tensors, None if the results depend on something unknown; and whether
    any of those values is a guess."""
    operation = call.operation
    if operation.random:
        return None, False
    missing = guessed = False
    read_shapes_only = operation.reads_shapes_only
    overwritten = call.args[0] if operation.overwrites and call.args else None

    def real(value: torch.Tensor) -> torch.Tensor | None:
        nonlocal missing, guessed
        known = known_of(value)
        guessed = guessed or _is_guessed(value)
        if known is None and (read_shapes_only or (value is overwritten and elements.is_small(value))):
            known = torch.zeros((), dtype=value.dtype).expand(value.shape)
            if value is overwritten:
                known = known.clone()
                written.append((value, known))
        missing = missing or known is None
        return known

    written: list[tuple[Any, torch.Tensor]] = []
    translated = call.translated(real)
    if missing:
        return None, False
    for value, known in written:
        elements.forget(_elements(value))
        elements.remember(value, _elements(value), known)
    return translated, guessed


def _fake_arguments(call: Call) -> _Arguments:
    """The arguments as fakes; a boolean index whose value is known as the positions that it selects."""

    def fake(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, SimulatedTensor):
            inner = _elements(value)
            call.stands_for(inner, value)
            return inner
        return value if compat.is_fake(value) else elements.fake_like(value)

    args, kwargs = call.translated(fake)
    if call.operation.indexed:
        args[1] = [part for index in call.args[1] for part in _as_positions(index, fake)]
    return args, kwargs


def _as_positions(index: Any, fake: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    if index is None:
        return [None]
    if index.dtype not in (torch.bool, torch.uint8):
        return [fake(index)]
    mask = known_of(index)
    if mask is None:
        with elements.fake_mode:
            return list(bounded_positions(fake(index)) or [fake(index)])
    _tell_choice(_is_guessed(index))
    return [elements.fake_like(positions) for positions in mask.nonzero(as_tuple=True)]


def _selecting(value: torch.Tensor, mask: torch.Tensor) -> Callable[..., Any] | None:
    """`masked_select` as indexing by the positions that the mask selects; None if they are not known."""
    known = known_of(mask)
    if known is None:
        return None
    shape = torch.broadcast_shapes(value.shape, known.shape)
    positions = [elements.fake_like(index) for index in known.expand(shape).nonzero(as_tuple=True)]
    return lambda value, mask: value.expand(shape)[tuple(positions)]


def _elements(value: SimulatedTensor) -> torch.Tensor:
    """The fake elements of a tensor; of one that was made before elements were fake, those of its twin."""
    return value.elements if compat.is_fake(value.elements) else _twin(value)


def _twin(value: SimulatedTensor) -> torch.Tensor:
    """Fake elements for a tensor with real ones, made once; the ledger has counted the real storage already."""
    twin: torch.Tensor | None = value.__dict__.get("twin")
    if twin is None or twin.shape != value.elements.shape or twin.fake_mode is not elements.fake_mode:  # type: ignore[attr-defined] # a fake tensor has one
        twin = elements.fake_like(value.elements.detach())
        ledger.adopt(twin.untyped_storage())
        value.__dict__["twin"] = twin
        elements.remember(value, twin, value.elements.detach().clone())
    return twin


def _fakes_like(real: Any) -> Any:
    if isinstance(real, torch.Tensor):
        return elements.fake_like(real)
    return type(real)(_fakes_like(item) for item in real) if isinstance(real, (list, tuple)) else real


def _are_small(results: Any) -> bool:
    items = results if isinstance(results, (list, tuple)) else (results,)
    return all(elements.is_small(item) for item in items if isinstance(item, torch.Tensor))


def _keep(call: Call, result: Any, real: Any, guessed: bool) -> None:
    """Keep real values beside new results, and forget what was overwritten by something unknown."""
    if real is None:
        for name, written in call.written():
            # Unknown gradients are taken as finite: a loss scaler must not skip the step.
            if not (call.func is _NON_FINITE_CHECK and name == "found_inf"):
                elements.forget(_elements(written))
        return
    if isinstance(result, SimulatedTensor):
        result, real = (result,), (real,)
    if isinstance(result, (list, tuple)):
        for wrapper, value in zip(result, real, strict=False):
            if isinstance(wrapper, SimulatedTensor) and isinstance(value, torch.Tensor):
                elements.remember(wrapper, _elements(wrapper), value, guessed)
