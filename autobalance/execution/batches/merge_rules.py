"""Rules by which what micro-batches give becomes what the whole batch would have given."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from autobalance.compat import is_fake
from autobalance.execution.batches.merging import Rule, Rules, UnmergeableError, apply, at, columns_of, shares_of, shown
from autobalance.execution.batches.sample_layout import is_sample_list


class Mismatch(NamedTuple):
    """A place where no rule gives the whole's value from those of the parts.

    Attributes:
        name: of the place, in words such as "['logits']"; "" is the value itself.
        reason: why, with values or shapes.
    """

    name: str
    reason: str


def guess(parts: Sequence[Any], sizes: Sequence[int]) -> Rules:
    """Rules for values of which nothing else is known.

    Tensors with a dimension as large as each part has samples are concatenated along it, lists with an item for each
    sample too; other floats are means, other whole numbers sums, unless they are the same in all parts.

    Example:
        >>> guess([{"loss": torch.tensor(1.0), "ids": ["a", "b"]}, {"loss": torch.tensor(2.0), "ids": ["c"]}], [2, 1])
        {"['loss']": Rule('mean'), "['ids']": Rule('list')}

    Args:
        parts: what each micro-batch gives.
        sizes: samples of each.

    Raises:
        UnmergeableError: they give different things for which there is no rule.
    """
    return dict(_guessed("", parts, sizes))


def learn(
    whole: Any,
    parts: Sequence[Any],
    sizes: Sequence[int],
    weights: Sequence[Any] | None = None,
    tolerance: float = 1e-4,
) -> Rules | Mismatch:
    """Rules that give the value of the whole batch from those of its parts.

    Example:
        >>> learn(torch.tensor(7.0), [torch.tensor(3.0), torch.tensor(4.0)], [2, 2])
        {"": Rule('sum')}

    Args:
        whole: what the batch gives.
        parts: what each of its parts gives.
        sizes: samples of each part.
        weights: by which means are weighted, adding up to 1; None: by samples.
        tolerance: largest relative difference.

    Returns:
        The rules, or the first place for which there is none.
    """
    rules = {}
    for name, found in _learned("", whole, parts, sizes, weights or shares_of(sizes), tolerance):
        if isinstance(found, str):
            return Mismatch(name, found)
        rules[name] = found
    return rules


def _guessed(name: str, values: Sequence[Any], sizes: Sequence[int]) -> Iterator[tuple[str, Rule]]:
    if _are_sample_lists(values, sizes):
        yield name, Rule("list")
    elif (columns := columns_of(values)) is not None:
        for part, inner in columns:
            yield from _guessed(name + part, inner, sizes)
    else:
        yield name, _guessed_rule(name, values, sizes)


def _guessed_rule(name: str, values: Sequence[Any], sizes: Sequence[int]) -> Rule:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise UnmergeableError(f"micro-batches give values of different types{at(name)}: {kinds}")
    if (dims := _sample_dims(values, sizes)) and (isinstance(first, (Tensor, np.ndarray))):
        return Rule("cat", dims[0])
    if isinstance(first, Tensor) and first.is_floating_point():
        return Rule("mean")
    if not isinstance(first, (Tensor, bool)) and isinstance(first, int) and first > 1 and list(values) == list(sizes):
        return Rule("sum")  # a count of samples
    if all(_same(value, first, 0.0) for value in values):
        return Rule("equal")
    if isinstance(first, float):
        return Rule("mean")
    if isinstance(first, int) and not isinstance(first, bool):
        return Rule("sum")
    if isinstance(first, Tensor) and first.dtype is not torch.bool:
        return Rule("sum")
    raise UnmergeableError(
        f"micro-batches give different values of type {type(first).__name__}{at(name)}, for which there is no rule"
    )


def _learned(
    name: str, whole: Any, values: Sequence[Any], sizes: Sequence[int], weights: Sequence[Any], tolerance: float
) -> Iterator[tuple[str, Rule | str]]:
    if is_sample_list(whole, sum(sizes)) and _are_sample_lists(values, sizes):
        yield name, Rule("list")
        return
    columns = columns_of([whole, *values])
    if columns is None:
        yield name, _learned_rule(whole, values, sizes, weights, tolerance)
        return
    for part, (inner, *inners) in columns:
        yield from _learned(name + part, inner, inners, sizes, weights, tolerance)


def _learned_rule(
    whole: Any, values: Sequence[Any], sizes: Sequence[int], weights: Sequence[Any], tolerance: float
) -> Rule | str:
    if any(type(value) is not type(whole) for value in values):
        return f"the whole batch gives {shown(whole)}, its parts {', '.join(map(shown, values))}"
    for rule in _candidates(whole, values, sizes):
        if _same(apply(rule, values, weights), whole, tolerance):
            return rule
    return f"no rule gives {shown(whole)} from {', '.join(map(shown, values))}, as the parts of the batch have it"


def _candidates(whole: Any, values: Sequence[Any], sizes: Sequence[int]) -> Iterator[Rule]:
    if isinstance(whole, (Tensor, np.ndarray)):
        yield from (Rule("cat", dim) for dim in _sample_dims([whole, *values], [sum(sizes), *sizes]))
    yield from (Rule("equal") for _ in [0] if all(_same(value, values[0], 0.0) for value in values))
    is_number = isinstance(whole, (int, float)) and not isinstance(whole, bool)
    is_tensor = isinstance(whole, Tensor) and whole.dtype is not torch.bool
    if is_number or (is_tensor and all(value.shape == whole.shape for value in values)):
        yield from map(Rule, ("mean", "sum", "max", "min"))


def _are_sample_lists(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    return all(is_sample_list(value, size) for value, size in zip(values, sizes, strict=True))


def _sample_dims(values: Sequence[Any], sizes: Sequence[int]) -> list[int]:
    """Dimensions that are as large as each part has samples, if the others are the same in all."""
    shapes = [tuple(value.shape) if isinstance(value, (Tensor, np.ndarray)) else () for value in values]
    if len({len(shape) for shape in shapes}) > 1:
        return []
    return [
        dim
        for dim in range(len(shapes[0]))
        if all(shape[dim] == size for shape, size in zip(shapes, sizes, strict=True))
        and len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) == 1
    ]


def _same(one: Any, other: Any, tolerance: float) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if is_fake(one) or is_fake(other):  # a trial has no numbers to compare
            return True
        loose = max(tolerance, 1e-2 if tolerance and one.element_size() < 4 else 0.0)
        return torch.allclose(one, other.to(one.device), rtol=loose, atol=loose * 1e-2, equal_nan=True)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other) or np.allclose(one, other, rtol=tolerance))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance * 1e-2) or (one != one and other != other)
    return bool(one == other)
