"""Tensors are found in what operations are given, in order, and nothing else is."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from autobalance.profiling.operands import operands_in

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
def test_operands_are_found_in_order(value: Any, expected: list[torch.Tensor]) -> None:
    found = list(operands_in(value))
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]
