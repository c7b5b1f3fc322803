"""Bytes counted while elements are fake equal those counted with real numbers, to the byte."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from autobalance.simulated import SimulatedTensor, fake_elements

WIDTH, BATCH, TIME = 16, 3, 8
DEVICE = 1


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0, masked: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.masked = dropout, masked

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        query, key, value = self.qkv(x).view(batch, time, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(time, time, dtype=torch.bool, device=x.device).tril() if self.masked else None
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=self.dropout, is_causal=not self.masked
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(dropout)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed_forward(x)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.block, self.reentrant = nn.Linear(WIDTH, WIDTH), Block(0.1), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


class Rnn(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Packed(nn.Module):
    """A recurrent layer over sequences of different length."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([TIME - 1, TIME, 2])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, groups=4),
            nn.GroupNorm(2, 8),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.ConvTranspose2d(8, 2, 2, stride=2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x[:, None])


class Embedded(nn.Module):
    """Embedding, boolean-mask indexing, a decision on a mask, and cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, WIDTH, padding_idx=0), nn.Linear(WIDTH, 20)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(BATCH * TIME, device=x.device).remainder(20).view(BATCH, TIME)
        mask = tokens > 3
        if mask.any():
            tokens = tokens * mask
        hidden = self.embed(tokens)[mask]
        return F.cross_entropy(self.head(hidden), tokens[mask], reduction="none")


CASES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)),
    "causal attention": Block,
    "attention with mask": lambda: Attention(masked=True),
    "attention with dropout": lambda: Block(0.1),
    "checkpoint": lambda: Checkpointed(False),
    "reentrant checkpoint": lambda: Checkpointed(True),
    "lstm": lambda: Rnn(nn.LSTM, num_layers=2, dropout=0.1),
    "bidirectional gru": lambda: Rnn(nn.GRU, bidirectional=True),
    "packed sequence": Packed,
    "convolution": Convolutional,
    "rms norm": lambda: nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)),
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True),
    "embedding and masks": Embedded,
}
OPTIMIZERS: dict[str, dict[str, bool]] = {
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "fused": {"fused": True},
}


def two_steps(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, precision: torch.dtype | None) -> None:
    scaler = torch.amp.GradScaler("simulated", init_scale=8.0, enabled=precision is torch.float16)
    for _ in range(2):
        cast = contextlib.nullcontext() if precision is None else torch.autocast("simulated", precision)
        with cast:
            loss = model(x).float().pow(2).mean()
        scaler.scale(loss).backward()
        del loss
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def peak_of(model: nn.Module, x: Tensor, options: dict[str, bool], precision: torch.dtype | None) -> int:
    """Most bytes above those of the model and its input."""
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    gc.collect()
    torch.simulated.reset_peak_memory_stats(DEVICE)
    before = torch.simulated.memory_allocated(DEVICE)
    two_steps(model, x, optimizer, precision)
    return torch.simulated.max_memory_allocated(DEVICE) - before


def fake_copy(mode: FakeTensorMode, model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        fake = SimulatedTensor(mode.from_tensor(tensor.detach()), DEVICE)
        memo[id(tensor)] = nn.Parameter(fake) if isinstance(tensor, nn.Parameter) else fake
    return copy.deepcopy(model, memo)


def counted(name: str, options: dict[str, bool], precision: torch.dtype | None) -> int:
    x = torch.randn(BATCH, TIME, WIDTH).to(f"simulated:{DEVICE}")
    return peak_of(CASES[name]().to(f"simulated:{DEVICE}"), x, options, precision)


def forecast(name: str, options: dict[str, bool], precision: torch.dtype | None) -> int:
    mode = FakeTensorMode()
    with fake_elements(mode):
        model = fake_copy(mode, CASES[name]())
        x = torch.randn(BATCH, TIME, WIDTH).to(f"simulated:{DEVICE}")
        return peak_of(model, x, options, precision)


@pytest.mark.parametrize(
    "precision", [None, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "scaled float16"]
)
@pytest.mark.parametrize("name", CASES)
def test_forecast_equals_count(name: str, precision: torch.dtype | None) -> None:
    assert forecast(name, OPTIMIZERS["foreach"], precision) == counted(name, OPTIMIZERS["foreach"], precision) > 0


@pytest.mark.parametrize("optimizer", ["for-loop", "fused"])
@pytest.mark.parametrize("name", ["mlp", "attention with dropout", "convolution"])
def test_forecast_equals_count_for_every_kind_of_optimizer(name: str, optimizer: str) -> None:
    options = OPTIMIZERS[optimizer]
    assert forecast(name, options, torch.bfloat16) == counted(name, options, torch.bfloat16) > 0
