"""Tensors are found in nested containers, in order, and nothing else is."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from autobalance.profiling.nested import tensors_in

A, B = torch.zeros(1), torch.zeros(2)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (A, [A]),
        ([A, (B, None, 3, "text")], [A, B]),
        (OrderedDict(first={"inner": B}, second=[A]), [B, A]),
        ((A, A), [A, A]),
        ("text", []),
        (None, []),
    ],
)
def test_tensors_are_found_in_order(value: Any, expected: list[torch.Tensor]) -> None:
    found = list(tensors_in(value))
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]
