"""What micro-batches give, merged into what the whole batch would have given.

A rule for each place in what a step returns says how: tensors with samples are concatenated, means are weighted, what
is the same everywhere is taken once. Where rules come from: `merge_rules`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor


class Rule(NamedTuple):
    """How the values at one place are merged.

    Attributes:
        kind: "cat" concatenates tensors, "list" lists; "equal" and "first" take the first value; "mean" weighs; "sum",
            "max" and "min" are what they say.
        dim: along which tensors are concatenated.
    """

    kind: str
    dim: int = 0


Rules: TypeAlias = Mapping[str, Rule]
"""Rules by place, in words such as "['losses'][0]"; "" is the value itself."""


class UnmergeableError(ValueError):
    """What micro-batches give cannot be merged.

    Example:
        >>> guess([{"a": object()}, {"a": object()}], [2, 2])
        UnmergeableError: micro-batches give different values of type object at ['a'], for which there is no rule
    """


def merge(parts: Sequence[Any], sizes: Sequence[int], rules: Rules, weights: Sequence[Any] | None = None) -> Any:
    """What the whole batch would have given.

    Example:
        >>> parts = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(4.0)}]
        >>> merge(parts, [2, 1], guess(parts, [2, 1]))
        {'loss': tensor(2.)}

    Args:
        parts: what each micro-batch gives, in the order of the samples.
        sizes: samples of each.
        rules: by `guess` or `learn`.
        weights: by which means are weighted, adding up to 1; None: by samples.

    Raises:
        UnmergeableError: the parts do not look as those did for which the rules are.
    """
    return _merged("", parts, rules, weights or shares_of(sizes))


def apply(rule: Rule, values: Sequence[Any], weights: Sequence[Any]) -> Any:
    """The values of one place merged by one rule.

    Example:
        >>> apply(Rule("mean"), [1.0, 4.0], [0.5, 0.5])
        2.5

    Args:
        rule: how.
        values: tensors, arrays, numbers or lists.
        weights: by which a mean is weighted, adding up to 1.
    """
    first = values[0]
    if rule.kind in ("equal", "first"):
        return first
    if rule.kind == "list":
        return type(first)(chain.from_iterable(values))
    if isinstance(first, Tensor):
        values = [value.to(first.device) for value in values]
    if rule.kind == "cat":
        return np.concatenate(values, rule.dim) if isinstance(first, np.ndarray) else torch.cat(tuple(values), rule.dim)
    if rule.kind in ("max", "min"):
        return _extreme(rule.kind, values)
    return _weighted_sum(values, weights if rule.kind == "mean" else [1] * len(values))


def _weighted_sum(values: Sequence[Any], weights: Sequence[Any]) -> Any:
    first = values[0]
    if not isinstance(first, Tensor):
        weights = [float(weight) if isinstance(weight, Tensor) else weight for weight in weights]
        return sum(map(counted, values, weights))
    is_short = first.is_floating_point() and first.element_size() < 4
    wide = [value.float() if is_short else value for value in values]
    at_hand = [weight.to(first.device) if isinstance(weight, Tensor) else weight for weight in weights]
    total: Any = sum(map(counted, wide, at_hand))
    return total.to(first.dtype) if is_short else total


def _extreme(kind: str, values: Sequence[Any]) -> Any:
    if not isinstance(values[0], Tensor):
        return max(values) if kind == "max" else min(values)
    stacked = torch.stack(tuple(values))
    return stacked.amax(0) if kind == "max" else stacked.amin(0)


def _merged(name: str, values: Sequence[Any], rules: Rules, weights: Sequence[Any]) -> Any:
    if name in rules:
        return apply(rules[name], values, weights)
    columns = columns_of(values)
    if columns is None:
        raise UnmergeableError(
            f"micro-batches give something else than before{at(name)}: {', '.join(map(shown, values))}"
        )
    return _rebuilt(values[0], [_merged(name + part, inner, rules, weights) for part, inner in columns])


def columns_of(values: Sequence[Any]) -> list[tuple[str, list[Any]]] | None:
    """What containers of one kind hold, place by place; None if they are none, or differ.

    Args:
        values: one for each part.
    """
    held = [_held(value) for value in values]
    if any(inner is None or type(value) is not type(values[0]) for inner, value in zip(held, values, strict=True)):
        return None
    names = [[name for name, _ in inner or ()] for inner in held]
    if any(other != names[0] for other in names):
        return None
    return [(name, [inner[place][1] for inner in held if inner]) for place, name in enumerate(names[0])]


def _held(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", value[key]) for key in value]
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        return [(f".{names[index]}" if names else f"[{index}]", item) for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _rebuilt(like: Any, items: Sequence[Any]) -> Any:
    if isinstance(like, tuple):
        return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)
    if isinstance(like, list):
        return type(like)(items)
    made = copy.copy(like)
    if isinstance(like, Mapping):
        for key, item in zip(like, items, strict=True):
            made[key] = item
    else:
        for field, item in zip(dataclasses.fields(like), items, strict=True):
            object.__setattr__(made, field.name, item)
    return made


def counted(value: Any, weight: Any) -> Any:
    """What a value adds to a weighted mean: nothing where it weighs nothing, for a mean over nothing is no number.

    Example:
        >>> counted(torch.tensor(nan), 0.0)
        tensor(0.)

    Args:
        value: of one part.
        weight: of that part.
    """
    if isinstance(weight, Tensor) and isinstance(value, Tensor):
        return torch.where(weight != 0, value, 0) * weight
    if weight == 0:
        return torch.zeros_like(value) if isinstance(value, Tensor) else value * 0 if value == value else 0.0
    return value * weight


def adding_up(weights: Sequence[Any]) -> list[Any]:
    """Weights in the same proportions that add up to 1.

    Args:
        weights: numbers or tensors without dimensions, none negative.
    """
    total: Any = sum(weights)
    return [weight / total for weight in weights]


def shares_of(sizes: Sequence[int]) -> list[float]:
    """Weights by samples.

    Args:
        sizes: samples of each part.
    """
    return [size / sum(sizes) for size in sizes]


def shown(value: Any) -> str:
    """A value in a few words.

    Args:
        value: of any kind.
    """
    if isinstance(value, Tensor) and value.dim():
        return f"a tensor {tuple(value.shape)}"
    text = f"{value.item():.6g}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"


def at(name: str) -> str:
    """Where something is, as the end of a phrase.

    Args:
        name: of the place, such as "['loss']"; "" for the whole.
    """
    return f" at {name}" if name else ""
