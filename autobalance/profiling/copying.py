"""A copy of the user's model for the trial: same code and structure, but every tensor replaced.

The trial may do with it what it likes; the user's model, its trainer and its metrics never notice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Replace = Callable[[Tensor], Tensor]


def copy_module(root: nn.Module, replace: Replace, instead: Mapping[int, Any]) -> tuple[nn.Module, list[str]]:
    """Copy `root` with every reachable tensor replaced.

    Example:
        >>> twin, shared = copy_module(model, torch.empty_like, {})   # doctest: +SKIP

    Args:
        root: the model; not changed.
        replace: makes the tensor that stands for one of the model's; asked once per tensor, so ties stay ties.
        instead: what stands for an object, by the object's id (the trainer, a metric).

    Returns:
        The copy, and the qualified names of attributes that could not be copied and are shared with the original.
    """
    memo: dict[int, Any] = dict(instead)
    originals = list(root.named_modules())
    found = list(_reachable(root, set(memo)))
    for tensor in found:
        if isinstance(tensor, Tensor):
            memo[id(tensor)] = _stand_in(tensor, replace)
    closures = [value for value in found if isinstance(value, FunctionType) and _holds_parts_of_a_model(value)]
    shells = []
    for name, module in originals:
        if id(module) in memo:
            continue
        shell = module.__new__(type(module))
        memo[id(module)] = shell
        shells.append((name, module, shell))
    for function in closures:
        memo[id(function)] = _with_empty_cells(function)
    shared: list[str] = []
    for function in closures:
        _fill_cells(function, memo, shared)
    for name, module, shell in shells:
        for key, value in module.__dict__.items():
            shell.__dict__[key] = _copy_attribute(value, memo, f"{name}.{key}" if name else key, shared)
    twin = memo[id(root)]
    assert isinstance(twin, nn.Module)
    return twin, shared


def _copy_attribute(value: Any, memo: dict[int, Any], name: str, shared: list[str]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    try:
        made = copy.deepcopy(value, memo)
    except Exception:  # locks, files, generators, handles of other libraries: whatever refuses to be copied
        shared.append(name)
        return value
    if isinstance(value, dict):  # of hooks, say; newer releases of Python copy no function, whatever the memo says
        made.update(
            {key: memo[id(item)] for key, item in value.items() if isinstance(item, FunctionType) and id(item) in memo}
        )
    return made


def _with_empty_cells(function: FunctionType) -> FunctionType:
    """A function like this one that shares no variable with it."""
    cells = tuple(CellType() for _ in function.__closure__ or ())
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def _fill_cells(function: FunctionType, memo: dict[int, Any], shared: list[str]) -> None:
    """Give the copy of a function copies of what its variables hold."""
    names = function.__code__.co_freevars
    for name, cell, made in zip(names, function.__closure__ or (), memo[id(function)].__closure__, strict=True):
        if _is_filled(cell):
            where = f"{name} in {function.__qualname__}"
            made.cell_contents = _copy_attribute(cell.cell_contents, memo, where, shared)


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _stand_in(tensor: Tensor, replace: Replace) -> Tensor:
    made = replace(tensor)
    if is_lazy(made):
        return made
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    # A kept loss has a graph that belongs to another step: its copy is a plain tensor.
    return made.requires_grad_() if tensor.is_leaf and tensor.requires_grad else made


_OPAQUE = (str, bytes, int, float, complex, type(None), type, ModuleType, torch.dtype, torch.device, torch.Generator)


def _reachable(start: Any, skip: set[int]) -> Iterator[Any]:
    """Everything in an object's attributes, whatever container, callable or other object holds it."""
    seen = set(skip)
    stack: list[Any] = [start]
    while stack:
        value = stack.pop()
        if not isinstance(value, _OPAQUE) and id(value) not in seen:
            seen.add(id(value))
            yield value
            stack.extend(_contents(value))


def _holds_parts_of_a_model(function: FunctionType) -> bool:
    """Whether a function has variables of its own, among them a module or a tensor."""
    return bool(function.__closure__) and any(
        isinstance(value, (Tensor, nn.Module)) for value in _reachable(function, set())
    )


def _contents(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return []
    if isinstance(value, MethodType):
        return [value.__self__]
    inside = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, FunctionType):
        return [*inside, *(cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))]
    if isinstance(value, partial):
        return [*inside, value.func, *value.args, *value.keywords.values()]
    if isinstance(value, Mapping):
        return [*inside, *value.values()]
    return [*inside, *value] if isinstance(value, (list, tuple, set, frozenset)) else inside
