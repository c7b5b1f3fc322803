"""Random models, split and in parts, learn what they learn whole: the slice of a benchmark of several hundred."""

from __future__ import annotations

import logging

import pytest

from tests.benchmarks.transparency import judge
from tests.benchmarks.transparent_runs import draw_case


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers", "ignore:You called `self.log")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize(("seed", "schedule"), [(4, "gpipe"), (8, "1f1b"), (2, "looped"), (9, "1f1b")])
def test_gradients_losses_and_peaks_are_those_of_the_whole_model_and_of_the_plan(seed: int, schedule: str) -> None:
    """Tied weights; weighted losses; dropout, recomputation, streaming and an auxiliary loss; bfloat16."""
    verdict = judge(draw_case(seed, schedule), steps=2)
    assert not verdict.faults, str(verdict.case)
