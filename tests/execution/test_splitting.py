"""Parts of a batch hold its samples, each in one part, in every container that a batch may come in."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from autobalance import SelfBalance, simulate
from autobalance.execution.batches.by_hook import sizes_of
from autobalance.execution.batches.packed import sequences_between
from autobalance.execution.batches.sample_layout import UnsplittableBatchError, layout_of, samples_of
from autobalance.execution.batches.splitting import part_sizes, parts_of, split, weights

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Images:
    pixels: Tensor
    source: str


class Movable:
    """Has a `.to`, as the batches of many libraries do."""

    def __init__(self, x: Tensor, names: list[str]) -> None:
        self.x, self.names = x, names

    def to(self, device: Any) -> Movable:
        raise AssertionError("a part is not moved")


def rows(n: int = 5) -> Tensor:
    return torch.arange(2.0 * n).view(n, 2)


@pytest.mark.parametrize(("samples", "count"), [(8, 4), (7, 3), (5, 4), (3, 8), (1, 2)])
def test_sizes_differ_by_at_most_one_and_larger_ones_come_first(samples: int, count: int) -> None:
    sizes = part_sizes(samples, count)
    assert sum(sizes) == samples
    assert len(sizes) == min(samples, count)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert sizes[0] == -(-samples // len(sizes))


@pytest.mark.parametrize(
    ("wrap", "read"),
    [
        (lambda x: x, lambda part: part),
        (lambda x: (x, 3), lambda part: part[0]),
        (lambda x: [x, "train"], lambda part: part[0]),
        (lambda x: {"a": {"b": [x]}}, lambda part: part["a"]["b"][0]),
        (lambda x: Pair(x, None), lambda part: part.x),
        (lambda x: Images(x, "disk"), lambda part: part.pixels),
        (lambda x: SimpleNamespace(x=x, scale=2.0), lambda part: part.x),
        (lambda x: Movable(x, list("abcde")), lambda part: part.x),
    ],
)
def test_a_batch_keeps_its_containers(wrap: Any, read: Any) -> None:
    batch = wrap(rows())
    parts = split(batch, 2)
    assert [type(part) for part in parts] == [type(batch)] * 2
    assert torch.equal(torch.cat([read(part) for part in parts]), rows())
    assert torch.equal(read(batch), rows())


def test_mappings_of_transformers_are_split_by_key_and_by_attribute() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import BaseModelOutput

    encoded = split(transformers.BatchEncoding({"input_ids": rows()}), 2)
    output = split(BaseModelOutput(last_hidden_state=rows()), 2)
    assert torch.equal(encoded[1]["input_ids"], rows()[3:])
    assert torch.equal(output[1].last_hidden_state, rows()[3:])
    assert torch.equal(output[1]["last_hidden_state"], rows()[3:])


def test_lists_and_arrays_with_an_item_for_each_sample_are_split() -> None:
    names, array = list("abcde"), np.arange(5)
    parts = split({"x": rows(), "names": names, "array": array, "other": ["k", "l"]}, 2)
    assert [part["names"] for part in parts] == [["a", "b", "c"], ["d", "e"]]
    assert [part["array"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert all(part["other"] == ["k", "l"] for part in parts)
    assert np.shares_memory(parts[0]["array"], array)
    assert split(names, 2) == [["a", "b", "c"], ["d", "e"]]


def test_targets_of_different_lengths_are_split_as_a_list_of_samples() -> None:
    targets = [{"boxes": torch.zeros(boxes, 4)} for boxes in (3, 1, 5)]
    parts = split((torch.zeros(3, 3, 8, 8), targets), 2)
    assert [[target["boxes"].shape[0] for target in part[1]] for part in parts] == [[3, 1], [5]]
    lengths = [len(part) for part in split([torch.zeros(length, 2) for length in (4, 2, 7, 1)], 2)]
    assert lengths == [2, 2]


def test_two_features_of_two_samples_are_not_taken_for_two_samples() -> None:
    parts = split([rows(2), torch.arange(2)], 2)
    assert [len(part) for part in parts] == [2, 2]
    assert parts[1][0].tolist() == [[2.0, 3.0]]


def test_packed_sequences_are_split_by_their_samples() -> None:
    sequences = [torch.arange(3), torch.arange(5), torch.arange(1)]
    parts = split((pack_sequence(sequences, enforce_sorted=False), torch.arange(3)), 2)
    unpacked = [sequence.tolist() for part in parts for sequence in unpack_sequence(part[0])]
    assert unpacked == [sequence.tolist() for sequence in sequences]
    assert [part[1].tolist() for part in parts] == [[0, 1], [2]]


def test_what_has_no_samples_is_shared() -> None:
    scale, weights_of_classes = torch.tensor(2.0), torch.ones(3)
    parts = split({"x": rows(), "scale": scale, "weights": weights_of_classes, "n": None}, 2, batch_size=5)
    assert all(part["scale"] is scale and part["weights"] is weights_of_classes for part in parts)


def test_a_tensor_that_occurs_twice_is_one_in_each_part() -> None:
    x = rows()
    for part in split({"source": x, "target": [x]}, 2):
        assert part["source"] is part["target"][0]


def test_parts_are_views_that_may_be_changed_apart() -> None:
    x = rows(4)
    one, other = split(x, 2)
    assert one.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    weight = torch.ones(2, requires_grad=True)
    loss = (one * weight).sum()
    other.mul_(2)  # ordinary views would make autograd refuse the backward of the other part
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 4.0]
    assert x[2:].tolist() == [[8.0, 10.0], [12.0, 14.0]]


def test_gradients_reach_a_batch_that_requires_them() -> None:
    x = rows(4).requires_grad_()
    sum((part**2).sum() for part in split(x, 3)).backward()
    assert torch.equal(x.grad, 2 * x.detach())  # type: ignore[arg-type]


def test_the_samples_may_be_in_another_dimension() -> None:
    batch = {"tokens": torch.zeros(7, 5), "labels": torch.zeros(5)}
    parts = split(batch, 2, batch_size=5)
    assert [tuple(part["tokens"].shape) for part in parts] == [(7, 3), (7, 2)]


def test_the_layout_of_one_batch_holds_for_a_smaller_one() -> None:
    layout = layout_of({"tokens": torch.zeros(7, 5), "labels": torch.zeros(5)}, batch_size=5)
    last = {"tokens": torch.zeros(7, 3), "labels": torch.zeros(3)}
    assert samples_of(last, layout) == 3
    assert [tuple(part["tokens"].shape) for part in split(last, 2, layout=layout)] == [(7, 2), (7, 1)]
    with pytest.raises(UnsplittableBatchError, match="laid out differently than the first"):
        split({"tokens": torch.zeros(7, 3)}, 2, layout=layout)


def test_the_last_batch_may_be_smaller_than_the_number_given() -> None:
    assert [part.shape[0] for part in split(rows(3), 2, batch_size=8)] == [2, 1]


def test_time_first_wins_where_the_other_tensors_say_so() -> None:
    batch = {"square": torch.zeros(5, 5), "tokens": torch.zeros(7, 5)}
    assert layout_of(batch, batch_size=5) == {"batch['square']": 1, "batch['tokens']": 1}


@pytest.mark.parametrize(
    ("batch", "batch_size", "words"),
    [
        ((torch.zeros(4, 2), {"y": torch.zeros(3)}), None, r"batch\[0\] is \(4, 2\), batch\[1\]\['y'\] is \(3,\)"),
        (torch.tensor(1.0), None, "holds no tensor with samples"),
        ({"a": torch.zeros(3, 3), "b": torch.zeros(2)}, 3, r"more than one dimension of batch\['a'\].*the 3 samples"),
    ],
)
def test_a_batch_that_cannot_be_split_is_named(batch: Any, batch_size: int | None, words: str) -> None:
    with pytest.raises(UnsplittableBatchError, match=words) as error:
        split(batch, 2, batch_size)
    assert "split_batch(self, batch, n)" in str(error.value)


def test_a_module_says_how_its_batches_are_split_and_weighed() -> None:
    class Graphs(SelfBalance):
        def split_batch(self, batch: Any, n: int) -> Any:
            return [SimpleNamespace(nodes=batch.nodes[i::n], num_graphs=len(batch.nodes[i::n])) for i in range(n)]

        def loss_weight(self, batch: Any) -> Any:
            return batch.nodes.sum()

    parts = parts_of(Graphs(), SimpleNamespace(nodes=torch.arange(5.0)), 2)
    assert parts.sizes == [3, 2]
    assert [float(weight) for weight in parts.weights] == pytest.approx([0.6, 0.4])


def test_hooks_count_without_the_mixin_and_by_default_samples_do() -> None:
    plain = parts_of(SelfBalance(), rows(), 2)
    assert (plain.sizes, plain.weights) == ([3, 2], [0.6, 0.4])
    hooked = parts_of(SimpleNamespace(loss_weight=lambda batch: batch.shape[0] ** 2), rows(), 2)
    assert hooked.weights == pytest.approx([9 / 13, 4 / 13])


def test_a_hook_that_gives_no_parts_is_named() -> None:
    with pytest.raises(UnsplittableBatchError, match="gives Tensor instead of a list of parts"):
        parts_of(SimpleNamespace(split_batch=lambda batch, n: batch), rows(), 2)
    with pytest.raises(ValueError, match="together they weigh nothing"):
        weights([1, 2], [1, 1], loss_weight=lambda batch: 0)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ([], "gives list without parts: it is asked for up to 2, each like a batch"),
        ([rows(0), None], "gives list without parts that have samples: it is asked for up to 2"),
        ([rows(1), rows(2), rows(2)], "gives 3 parts, but is asked for up to 2"),
        ((rows(1), rows(2)), "loses samples: its parts have 1 + 2 = 3 of the 5 of a batch"),
    ],
)
def test_what_a_hook_gives_is_held_to_what_it_is_asked_for(made: Any, told: str) -> None:
    module = SimpleNamespace(split_batch=lambda batch, n: made)
    with pytest.raises(UnsplittableBatchError, match="`split_batch` of SimpleNamespace") as error:
        parts_of(module, rows(), 2)
    assert told in str(error.value)


def test_parts_without_samples_are_left_out() -> None:
    parts = parts_of(SimpleNamespace(split_batch=lambda batch, n: [rows(5), rows(0)]), rows(), 2)
    assert (parts.sizes, parts.weights, parts.is_by_hook) == ([5], [1.0], True)


def test_parts_whose_first_dimension_is_not_that_of_samples_lose_none() -> None:
    in_time = SimpleNamespace(split_batch=lambda batch, n: batch.tensor_split(n, dim=1))
    assert [part.shape for part in parts_of(in_time, torch.zeros(4, 5), 2).batches] == [(4, 3), (4, 2)]


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("between", [(0, 7), (0, 3), (2, 6), (6, 7)])
def test_sequences_of_a_packed_batch(is_sorted: bool, between: tuple[int, int]) -> None:
    lengths = [9, 8, 6, 6, 3, 2, 1] if is_sorted else [6, 1, 9, 3, 8, 2, 6]
    sequences = [torch.randn(length, 3) for length in lengths]
    packed = pack_sequence(sequences, enforce_sorted=is_sorted)
    some = sequences_between(packed, *between)
    expected = pack_sequence(sequences[slice(*between)], enforce_sorted=is_sorted)
    assert torch.equal(some.batch_sizes, expected.batch_sizes)
    assert (some.sorted_indices is None) == is_sorted
    torch.testing.assert_close(unpack_sequence(some), sequences[slice(*between)], rtol=0, atol=0)


def test_gradients_reach_a_packed_batch_through_its_parts() -> None:
    leaf = torch.randn(6, 2, requires_grad=True)
    packed = pack_sequence([leaf[:3], leaf[3:5], leaf[5:]])
    sum(part.data.square().sum() for part in split(packed, 2)).backward()
    torch.testing.assert_close(leaf.grad, 2 * leaf.detach())


def test_parts_whose_samples_cannot_be_told_count_alike() -> None:
    assert sizes_of([(rows(3), rows(2)), rows(2)]) == [1, 1]
    assert weights([rows(3), rows(2)], [3, 2], reduction="sum") == [1.0, 1.0]


def test_batches_on_simulated_devices_are_split_there() -> None:
    with simulate(2):
        parts = split(torch.zeros(5, 2, device="simulated:1"), 2)
        assert [(part.shape[0], str(part.device)) for part in parts] == [(3, "simulated:1"), (2, "simulated:1")]


@pytest.mark.parametrize(("samples", "sizes"), [(8, [2, 2, 2, 2]), (5, [3, 2]), (3, [3])])
def test_parts_have_as_many_samples_as_they_need(samples: int, sizes: list[int]) -> None:
    assert parts_of(None, torch.zeros(samples, 2), 4, fewest=2).sizes == sizes
