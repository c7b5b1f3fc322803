"""Tensors are found in whatever blocks and steps are given: each once, in order."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from autobalance.placement.contents import tensors_in, untouchable

A, B, C = torch.zeros(1), torch.zeros(2), torch.zeros(3)


@dataclass
class Graph:
    nodes: Tensor
    edges: Any


class Movable:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def to(self, device: Any) -> Movable:
        return self


class Plain:
    def __init__(self, *inner: Any) -> None:
        self.inner = inner


class InSlots:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def ids(tensors: Any) -> list[int]:
    return [id(tensor) for tensor in tensors]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (A, [A]),
        ([A, (B, None, 3, "text", torch.device("cpu")), C], [A, B, C]),
        (OrderedDict(first={"inner": B}, second=[A]), [B, A]),
        ((A, B, A), [A, B]),
        (Graph(C, [Graph(A, B)]), [C, A, B]),
        (SimpleNamespace(x=A, y={"z": Movable([B])}), [A, B]),
        ([nn.Linear(2, 2), "text", None], []),
        ([Plain(A), InSlots(B)], []),
    ],
)
def test_tensors_are_found_in_data(value: Any, expected: list[Tensor]) -> None:
    assert ids(tensors_in(value)) == ids(expected)


def test_a_packed_sequence_holds_its_indices_too() -> None:
    packed = pack_sequence([A, B], enforce_sorted=False)
    assert ids(tensors_in(packed)) == ids([packed.data, packed.sorted_indices, packed.unsorted_indices])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([Plain(A, Plain(B)), InSlots(C)], [A, B, C]),
        (Graph(C, [Plain(A), nn.Linear(2, 2)]), [C, A]),
    ],
)
def test_objects_that_are_no_data_are_looked_into_where_that_is_wanted(value: Any, expected: list[Tensor]) -> None:
    assert ids(tensors_in(value, in_objects=True)) == ids(expected)


def test_what_holds_itself_comes_to_an_end() -> None:
    around, plain = [A], Plain(B)
    around.append(around)  # type: ignore[arg-type]
    plain.inner = (plain, B)
    assert ids(tensors_in([around, plain], in_objects=True)) == ids([A, B])


def test_objects_far_inside_others_are_left_alone() -> None:
    near, far = Plain(A), Plain(B)
    for _ in range(2):
        near = Plain(near)  # the object and its tuple: two levels each
    for _ in range(3):
        far = Plain(far)
    assert ids(tensors_in(near, in_objects=True)) == ids([A])
    assert ids(tensors_in(far, in_objects=True)) == []


class ChangesItself:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, dtype: torch.dtype) -> Any:
        self.x = self.x.to(dtype)
        return self


def test_an_object_that_moves_itself_is_copied_with_the_same_tensors() -> None:
    x = torch.zeros(2)
    batch: dict[str, Any] = {"graph": ChangesItself(x), "again": x}
    copied = untouchable(batch)
    assert copied["graph"].x is copied["again"] is x
    copied["graph"].to(torch.float64)
    copied["more"] = 1
    assert batch.keys() == {"graph", "again"}
    assert batch["graph"].x is x


def test_what_is_rebuilt_when_it_is_moved_is_not_copied() -> None:
    batch = {"x": [torch.zeros(2), "a.png"], "packed": (pack_sequence([torch.zeros(1)]), None)}
    assert untouchable(batch) is batch
    refusing = SimpleNamespace(x=torch.zeros(1), numbers=(number for number in range(2)))
    assert untouchable(refusing) is refusing
