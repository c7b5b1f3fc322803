"""Tensors that would be on the host in a run on a device are told from those that would not, though all are there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import autobalance
from autobalance.blocks import find_blocks
from autobalance.measuring.hosted import Hosted
from autobalance.measuring.measure import measure
from autobalance.profiling.trial import Batch, PlainTrial


def test_what_glue_makes_is_where_it_would_be_with_the_batch_on_a_device() -> None:
    batch = torch.ones(3, 2)
    with Hosted() as hosted:
        on_host = [batch.cpu(), batch.to("cpu"), torch.ones(3), batch.cpu().long() + 1, torch.tensor(batch.tolist())]
        on_device = [batch, batch * 2, torch.ones(3, device=batch.device), batch.cpu().to(batch.device)]
        on_device += [torch.ones(3).to(batch), batch[torch.tensor([0, 1])], batch.to(torch.float64)]
    assert all(map(hosted.holds, on_host))
    assert not any(map(hosted.holds, on_device))


def test_a_block_may_be_paused_for_and_tell_itself() -> None:
    value, other = torch.ones(2), torch.ones(2)
    with Hosted() as hosted, hosted.paused():
        value.cpu()
        hosted.add(other)
    assert (hosted.holds(value), hosted.holds(other)) == (False, True)


class Recurrent(nn.Module):
    """Packs by lengths, which torch wants to have on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = self.lstm(pack_padded_sequence(x, lengths, batch_first=True))[0]
        return pad_packed_sequence(packed, batch_first=True)[0]


class Lengths(nn.Module):
    """Returns lengths on the host, as blocks that read them do."""

    def forward(self, tokens: Tensor) -> Tensor:
        return (tokens > 0).sum(1).cpu()


class Packed(nn.Module):
    def __init__(self, in_block: bool = False) -> None:
        super().__init__()
        self.embed, self.lengths, self.encoder = nn.Embedding(16, 8), Lengths(), Recurrent()
        self.in_block = in_block

    def self_balance(self) -> list[nn.Module]:
        return [self.embed, self.lengths, self.encoder]

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = self.lengths(tokens) if self.in_block else (tokens > 0).sum(1).cpu()
        return self.encoder(self.embed(tokens), lengths)


TOKENS = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 0], [5, 0, 0, 0]])


@pytest.mark.parametrize("in_block", [False, True], ids=["by glue", "by another block"])
def test_lengths_that_are_on_the_host_reach_a_measured_block_there(in_block: bool) -> None:
    model = Packed(in_block)
    found = measure(model, Batch("train batch", "train", TOKENS), find_blocks(model), PlainTrial(), "simulated:1")
    assert found[2].saved > 0
    assert found[2].backward_time > 0


class Opaque(Recurrent):
    """Needs numbers: it cannot be traced."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out = super().forward(x, lengths)
        return out * out[out > 0].mean().item()


def test_lengths_that_are_on_the_host_reach_a_block_there_that_is_measured_for_a_trace() -> None:
    model = Packed()
    model.encoder = Opaque()
    profile = autobalance.profile(model, TOKENS, target="simulated")
    assert any("'encoder' cannot run on tensors without numbers" in note for note in profile.notes)
