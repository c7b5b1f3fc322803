"""A copy of the user's model for the trial: same code and structure, but every tensor replaced.

The trial may do with it what it likes; the user's model, its trainer and its metrics never notice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
    keep_alive: list[Any] = []
    for tensor in _reachable_tensors(root, set(memo)):
        memo[id(tensor)] = _stand_in(tensor, replace)
        keep_alive.append(tensor)
    shells = []
    for name, module in originals:
        if id(module) in memo:
            continue
        shell = module.__new__(type(module))
        memo[id(module)] = shell
        shells.append((name, module, shell))
    shared: list[str] = []
    for name, module, shell in shells:
        for key, value in module.__dict__.items():
            shell.__dict__[key] = _copy_attribute(value, memo, f"{name}.{key}" if name else key, shared)
    twin = memo[id(root)]
    assert isinstance(twin, nn.Module)
    return twin, shared


def _copy_attribute(value: Any, memo: dict[int, Any], name: str, shared: list[str]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # locks, files, generators, handles of other libraries: whatever refuses to be copied
        shared.append(name)
        return value


def _stand_in(tensor: Tensor, replace: Replace) -> Tensor:
    made = replace(tensor)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    # A kept loss has a graph that belongs to another step: its copy is a plain tensor.
    return made.requires_grad_() if tensor.is_leaf and tensor.requires_grad else made


_OPAQUE = (str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device, torch.Generator)


def _reachable_tensors(root: nn.Module, skip: set[int]) -> Iterator[Tensor]:
    """Every tensor in the model's attributes, whatever container or object holds it."""
    seen = set(skip)
    stack: list[Any] = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, _OPAQUE) or (callable(value) and not isinstance(value, nn.Module)):
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            stack.extend(value)
        if not isinstance(value, Tensor):
            stack.extend(getattr(value, "__dict__", {}).values())
