"""Blocks of random models: what each is given, keeps and returns differs as much as in models that people write.

All take and return sequences, a tensor of (samples, TIME, WIDTH), alone or in a container, and treat every sample by
itself: a batch in parts is the same batch.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Layer

WIDTH, TIME, CLASSES = 8, 5, 11
CONTAINERS = ("dict", "tuple", "namedtuple", "dataclass", "list")

Pair = namedtuple("Pair", ["x", "rest"])


@dataclass(frozen=True)
class Parcel:
    """A dataclass as models of other libraries return it."""

    x: Tensor
    rest: dict[str, Any] = field(default_factory=dict)


def pack(kind: str, x: Tensor, skip: Tensor) -> Any:
    """Two tensors in a nested container, beside None and a number.

    Example:
        >>> pack("tuple", x, skip)   # (x, [skip, None], 2)

    Args:
        kind: one of `CONTAINERS`.
        x, skip: any tensors.
    """
    rest = {"inner": (skip, None), "number": 2}
    containers: dict[str, Callable[[], Any]] = {
        "dict": lambda: {"x": x, **rest},
        "tuple": lambda: (x, [skip, None], 2),
        "namedtuple": lambda: Pair(x, rest),
        "dataclass": lambda: Parcel(x, rest),
        "list": lambda: [x, {"skip": skip}, None],
    }
    return containers[kind]()


def unpack(kind: str, packed: Any) -> tuple[Tensor, Tensor]:
    """The two tensors that `pack` has put into a container, after a check that its type was kept.

    Example:
        >>> x, skip = unpack("tuple", pack("tuple", x, skip))

    Args:
        kind: one of `CONTAINERS`.
        packed: what `pack` made of it.
    """
    assert type(packed) is {"dict": dict, "tuple": tuple, "namedtuple": Pair, "dataclass": Parcel, "list": list}[kind]
    if kind == "dict":
        return packed["x"], packed["inner"][0]
    if kind == "list":
        return packed[0], packed[1]["skip"]
    if kind == "tuple":
        return packed[0], packed[1][0]
    return packed.x, packed.rest["inner"][0]


class Dense(nn.Module):
    """Linear, tanh, dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(x)))


class Attention(Layer):
    """A transformer's layer, with dropout at its end."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


class Convolution(nn.Module):
    """A convolution over time."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.normed = nn.GroupNorm(2, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.relu(self.normed(self.convolution(x.transpose(1, 2))))).transpose(1, 2)


class Packed(nn.Module):
    """Takes its input in a container, and returns another of the same kind, in which what it was given goes on."""

    def __init__(self, dropout: float = 0.0, kind: str = "dict") -> None:
        super().__init__()
        self.kind = kind
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, packed: Any) -> Any:
        x, skip = unpack(self.kind, packed)
        return pack(self.kind, self.dropout(torch.tanh(self.linear(x) + 0.5 * skip)), skip)


class Keyed(nn.Module):
    """Takes keyword arguments; returns entries that are None, and one that is what it was given."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(
        self, x: Tensor, scale: float, *, bias: Tensor, nothing: None = None
    ) -> tuple[Tensor, None, dict[str, Tensor | None]]:
        return self.dropout(torch.tanh(self.linear(x) * scale + bias)), nothing, {"bias": bias, "state": None}


class Appender(nn.Module):
    """Appends its output to the caller's list."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        x = self.dropout(torch.tanh(self.linear(x)))
        kept.append(x)
        return x


class Writer(nn.Module):
    """Writes into the caller's dictionary and reads what others wrote."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        cache["last"] = self.dropout(torch.tanh(self.linear(x))) + cache.get("last", 0) * 0.5
        return cache["last"]


def make_block(kind: str, dropout: float) -> nn.Module:
    """A fresh block.

    Example:
        >>> make_block("packed dict", 0.0)

    Args:
        kind: one of `BLOCKS`.
        dropout: probability, in blocks that have one.
    """
    return BLOCKS[kind](dropout)


BLOCKS: dict[str, Callable[[float], nn.Module]] = {
    "dense": Dense,
    "attention": Attention,
    "convolution": Convolution,
    "lstm": lambda dropout: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "gru": lambda dropout: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "norm": lambda dropout: nn.LayerNorm(WIDTH),
    **{f"packed {kind}": lambda dropout, kind=kind: Packed(dropout, kind) for kind in CONTAINERS},
    "keyed": Keyed,
    "appender": Appender,
    "writer": Writer,
    "embedding": lambda dropout: nn.Embedding(CLASSES, WIDTH),
    "head": lambda dropout: nn.Linear(WIDTH, CLASSES),
}
