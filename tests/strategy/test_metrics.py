"""Metrics in a trial take the memory that they take in the run."""

from __future__ import annotations

import pytest
import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from autobalance.strategy.trials.metrics import stand_in_for_metric


@pytest.mark.usefixtures("simulated")
def test_a_stand_in_holds_the_state_of_a_metric_and_its_defaults() -> None:
    before = torch.simulated.memory_allocated(0)
    metric = MulticlassConfusionMatrix(50).to("simulated:0")
    held = torch.simulated.memory_allocated(0) - before
    assert held >= 2 * 50 * 50 * 8
    stand_in = stand_in_for_metric(MulticlassConfusionMatrix(50)).to("simulated:0")
    zero = 512  # that it answers with, which takes a granule
    assert torch.simulated.memory_allocated(0) - before == 2 * held + zero
    del metric, stand_in


@pytest.mark.usefixtures("simulated")
def test_a_stand_in_for_a_collection_holds_all_of_its_metrics_and_answers_by_their_names() -> None:
    def scores() -> MetricCollection:
        return MetricCollection([MulticlassAccuracy(3), MulticlassConfusionMatrix(50)], prefix="val.")

    before = torch.simulated.memory_allocated(0)
    collection = scores().to("simulated:0")
    held = torch.simulated.memory_allocated(0) - before
    stand_in = stand_in_for_metric(scores()).to("simulated:0")
    zeros = 2 * 512  # that they answer with, which take a granule each
    assert torch.simulated.memory_allocated(0) - before == 2 * held + zeros
    assert set(stand_in()) == set(stand_in.compute()) == {"val.MulticlassAccuracy", "val.MulticlassConfusionMatrix"}
    del collection, stand_in
