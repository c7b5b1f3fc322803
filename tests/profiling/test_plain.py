"""The options of `autobalance.profile` that bring further passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autobalance


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8))


def test_a_scalable_profile_knows_the_bytes_of_any_batch() -> None:
    model = _model()
    scalable = autobalance.profile(model, torch.zeros(8, 64), optimizer=torch.optim.AdamW, scalable=True)
    for samples in (1, 7, 96):
        traced = autobalance.profile(model, torch.zeros(samples, 64), optimizer=torch.optim.AdamW)
        assert scalable.peak(batch_size=samples) == traced.peak()


def test_why_a_profile_cannot_be_scaled_is_said() -> None:
    batch = (torch.zeros(8, 64), torch.zeros(3, 64))
    profile = autobalance.profile(_model(), batch, step=lambda model, batch: model(batch[0]).sum(), scalable=True)
    assert "tensors of the batch have different first dimensions (3, 8)" in profile.notes[-1]
    with pytest.raises(ValueError, match="how bytes depend on the number of samples is not known"):
        profile.peak(batch_size=16)


def test_times_are_measured_where_a_device_is_given() -> None:
    model = _model()
    calculated = autobalance.profile(model, torch.zeros(8, 64))
    measured = autobalance.profile(model, torch.zeros(8, 64), measure="simulated:0")
    assert measured.peak() == calculated.peak()
    for mine, theirs in zip(measured.blocks, calculated.blocks, strict=True):
        assert mine.forward_time > 0
        assert mine.forward_time != theirs.forward_time


class Positions(nn.Module):
    """Makes a tensor in its forward, on the device of its input and on none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + torch.arange(16, dtype=x.dtype, device=x.device)
        scaled: Tensor = self.second(x) * torch.tensor(2.0)
        return scaled


def test_a_model_may_be_profiled_where_it_is_built_on_meta() -> None:
    with torch.device("meta"):
        inside = autobalance.profile(Positions(), torch.zeros(4, 16), optimizer=torch.optim.AdamW)
    outside = autobalance.profile(Positions(), torch.zeros(4, 16), optimizer=torch.optim.AdamW)
    assert inside == outside


@pytest.mark.parametrize("rows", [2, 64])
def test_a_batch_on_meta_costs_what_one_with_values_does(rows: int) -> None:
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16))
    batch = torch.zeros(rows, 8, dtype=torch.int64)
    assert autobalance.profile(model, batch.to("meta")).blocks == autobalance.profile(model, batch).blocks


class Selects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))[x[:, 0] > 0]


def test_a_step_that_reads_values_of_a_batch_on_meta_is_refused_in_words() -> None:
    with pytest.raises(
        ValueError, match=r"reads values of the batch, but .* on meta \(shape \[2, 8\], torch.float32\)"
    ):
        autobalance.profile(Selects(), torch.zeros(2, 8, device="meta"))
