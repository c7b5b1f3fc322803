from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autobalance.profiling.signature import elements_of, resized, signature_of


@dataclass
class Graph:
    nodes: Tensor
    edges: list[Tensor]


def test_names_types_and_shapes_are_told_in_the_order_of_the_batch() -> None:
    ids = torch.zeros(8, 128, dtype=torch.int64)
    assert signature_of({"input_ids": ids, "labels": ids[:, 0]}) == "input_ids=int64[8,128], labels=int64[8]"
    assert signature_of(torch.zeros(4, 3)) == "float32[4,3]"
    assert signature_of((torch.zeros(4), {"y": torch.zeros(())})) == "0=float32[4], 1.y=float32[]"
    graph = Graph(torch.zeros(5), [torch.zeros(2, 2, dtype=torch.bool)])
    assert signature_of(graph) == "nodes=float32[5], edges.0=bool[2,2]"
    assert signature_of("text") == ""


def test_many_tensors_are_told_by_the_first_ones_and_their_elements() -> None:
    signature = signature_of([torch.zeros(3)] * 20)
    assert signature.endswith("7=float32[3], 12 more of 36 elements")
    assert elements_of(signature) == 60


def test_elements_are_those_of_the_largest_batch() -> None:
    assert elements_of("x=float32[8,3], y=int64[]") == 25
    assert elements_of("x=float32[8,3] | x=float32[16,3]") == 48
    assert elements_of("") == 0


def test_another_number_of_samples_changes_first_dimensions_only() -> None:
    assert resized("x=float32[8,8], y=int64[8], z=int64[80,8]", 8, 64) == "x=float32[64,8], y=int64[64], z=int64[80,8]"
