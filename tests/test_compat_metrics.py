"""Every private name of torchmetrics still does what autobalance relies on; a failure here names what moved."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from autobalance.compat import metrics as private


def scores(samples: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(samples, 3, generator=generator).softmax(1), torch.arange(samples) % 3


@pytest.mark.parametrize("make", [lambda: MulticlassF1Score(3), lambda: MulticlassAUROC(3)])
def test_states_of_parts_merge_to_the_state_of_the_whole(make: Any) -> None:
    whole, parts = make(), make()
    probabilities, labels = scores()
    whole.update(probabilities, labels)
    parts.update(probabilities[:4], labels[:4])
    earlier = private.metric_state(parts)
    private.start_afresh(parts)
    assert private.metric_state(parts).updates == 0
    parts.update(probabilities[4:], labels[4:])
    private.add_earlier_state(parts, earlier)
    assert torch.equal(parts.compute(), whole.compute())


def test_a_state_can_be_put_back() -> None:
    metric = MulticlassAUROC(3)
    metric(*scores())
    before = private.metric_state(metric)
    expected = metric.compute()
    private.start_afresh(metric)
    metric.update(*scores(3))
    private.set_metric_state(metric, before)
    assert torch.equal(metric.compute(), expected)
    assert metric.update_count == 1


@pytest.mark.parametrize(
    ("metric", "can"),
    [
        (MulticlassAccuracy(3), True),
        (MulticlassAUROC(3), False),  # takes scores for probabilities where all lie between 0 and 1
        (BinaryAccuracy(), False),
        (torchmetrics.MeanSquaredError(), True),
        (torchmetrics.MeanMetric(), True),
        (torchmetrics.MaxMetric(), False),  # has its own say about full updates
        (torchmetrics.PearsonCorrCoef(), False),
        (torchmetrics.MinMaxMetric(MulticlassAccuracy(3)), False),
        (MulticlassAccuracy(3) + 1, False),
    ],
)
def test_which_states_can_be_merged(metric: Any, can: bool) -> None:
    assert private.states_can_be_merged(metric) is can


def test_a_copy_has_no_updates_and_the_copied_one_keeps_its_own() -> None:
    base = MulticlassAUROC(3)
    metric = torchmetrics.MinMaxMetric(base)
    metric.update(*scores())
    expected = metric.compute()["raw"].clone()
    twin = private.fresh_copy(metric)
    assert [part.update_count for part in twin.modules() if isinstance(part, MulticlassAUROC)] == [0]
    twin.update(*scores(3))
    assert base.update_count == 1
    assert torch.equal(metric.compute()["raw"], expected)


@pytest.mark.parametrize("apart", [True, False])
def test_a_copy_that_was_taken_apart_goes_at_once(apart: bool) -> None:
    twin = private.fresh_copy(torchmetrics.MinMaxMetric(MulticlassAUROC(3)))
    twin.update(*scores())
    parts = [weakref.ref(part) for part in twin.modules()]
    gc.collect()
    gc.disable()
    try:
        if apart:
            private.take_apart(twin)
        del twin
        gone = [part() is None for part in parts]
    finally:
        gc.enable()
    assert gone == [apart] * len(parts)


def test_groups_of_a_collection_are_formed_when_they_are_asked_for() -> None:
    collection = torchmetrics.MetricCollection(
        {
            "f1": MulticlassF1Score(3),
            "accuracy": MulticlassAccuracy(3, average="micro"),
            "recall": MulticlassAccuracy(3),
        }
    )
    assert private.groups_are_to_be_formed(collection)
    assert private.metric_groups(collection) == []
    with private.no_groups_formed(collection):
        collection.update(*scores())
    assert private.groups_are_to_be_formed(collection)
    private.form_groups(collection)
    assert not private.groups_are_to_be_formed(collection)
    reference = torchmetrics.MetricCollection(
        {
            "f1": MulticlassF1Score(3),
            "accuracy": MulticlassAccuracy(3, average="micro"),
            "recall": MulticlassAccuracy(3),
        }
    )
    reference.update(*scores())
    assert [len(group) for group in private.metric_groups(collection)] == [
        len(names) for names in reference.compute_groups.values()
    ]
    first, *others = next(group for group in private.metric_groups(collection) if len(group) > 1)
    private.start_afresh(first)
    private.share_states(collection)
    assert all(other.tp is first.tp for other in others)
