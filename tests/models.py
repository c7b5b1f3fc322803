"""Small models, one for each way in which blocks are called; the equality and forecast tests run them all.

Bodies are plain modules that know neither package, so one body serves both of them and plain torch:

    model = CASES["gpt"].make(LightningModule)      # or make(nn.Module): training_step(batch, 0) -> loss works as well
    losses = [model.training_step(batch, index) for index, batch in enumerate(CASES["gpt"].batches(5))]
"""

from __future__ import annotations

from collections import defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

WIDTH = 16
BATCH = 8


class Body(nn.Module):
    """A module with `forward(inputs) -> outputs` and `loss(batch)`; `block_names` are what `self_balance` returns."""

    block_names: tuple[str, ...] = ()

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self(inputs), targets)


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        shape = (batch, time, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class Gpt(Body):
    """Token and position embedding in glue, two layers, norm and head."""

    vocabulary, time = 20, 12
    block_names = ("embed", "position", "layers.0", "layers.1", "norm", "head")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.vocabulary, WIDTH)
        self.position = nn.Embedding(self.time, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, self.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


class TiedGpt(Gpt):
    """The head's weight is the embedding's: both must sit on one device."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.embed.weight, std=0.3)
        self.head.weight = self.embed.weight


def conv_block(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True)
    )


class ConvNet(Body):
    """Convolutions with batch norm, pooling and flattening in glue."""

    block_names = ("stem", "body.0", "body.1", "head")

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_block(3, 8)
        self.body = nn.ModuleList([conv_block(8, 8), conv_block(8, 16)])
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.body:
            x = F.max_pool2d(block(x), 2)
        return self.head(x.mean((2, 3)))

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)


class Chain(Body):
    """Four linear blocks `a`, `b`, `c`, `d`; subclasses say how glue joins them."""

    block_names = ("a", "b", "c", "d")

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


class ResidualsAcrossBlocks(Chain):
    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.a(x))
        second = torch.tanh(self.b(first))
        third = torch.tanh(self.c(second)) + first
        return self.d(third) + second


class SkipInGlue(Chain):
    """The batch itself, and a block's output from another device, are added in glue."""

    def forward(self, x: Tensor) -> Tensor:
        skip = self.a(x)
        x = self.c(torch.tanh(self.b(skip)))
        x = x + skip
        return self.d(torch.cat([x, skip], 0).view(2, *x.shape).sum(0))


class SumOfBranches(Chain):
    def forward(self, x: Tensor) -> Tensor:
        both = self.a(x) + self.b(x)
        return self.c(both) * self.d(both)


class CalledTwice(Chain):
    """Block `b` runs before and after `c`."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.d(torch.tanh(self.b(torch.tanh(self.c(x)))))


class Recurrent(Body):
    """Two recurrent blocks; the state of the first, a tuple for an LSTM, starts the second."""

    cell: type[nn.Module] = nn.LSTM
    block_names = ("first", "second", "head")

    def __init__(self) -> None:
        super().__init__()
        self.first = self.cell(WIDTH, WIDTH, batch_first=True)
        self.second = self.cell(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, state = self.first(x)
        x, state = self.second(x, state)
        last = state[0] if isinstance(state, tuple) else state
        return self.head(x[:, -1] + last[0])


class RecurrentGru(Recurrent):
    cell = nn.GRU


Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Frozen:
    tensor: Tensor
    label: str
    nested: dict[str, Any] = field(default_factory=dict)


class Carrier:
    """Holds a tensor and moves by `.to`, as batch classes of other libraries do."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, device: Any, non_blocking: bool = False) -> Carrier:
        return Carrier(self.tensor.to(device, non_blocking=non_blocking))


class Picky(nn.Module):
    """Uses one tensor of each kind of container and checks that every container kept its type."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        x: Tensor,
        scale: int,
        mode: str,
        nothing: None,
        tree: dict[str, Any],
        *,
        bias: Tensor,
        pair: Pair,
        frozen: Frozen,
        lookup: defaultdict[str, Tensor],
        carrier: Carrier,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert (nothing, mode, scale) == (None, "add", 2)
        assert (type(pair), type(frozen), type(carrier)) == (Pair, Frozen, Carrier)
        assert type(lookup) is defaultdict
        assert (lookup.default_factory is None, frozen.label) == (False, "kept")
        total = self.linear(x) * scale + bias + tree["list"][0] + tree["inner"]["value"] + pair.left * pair.right
        return total + frozen.tensor + frozen.nested["value"] + lookup["known"] + carrier.tensor, {"x": x}


class ManyArguments(Body):
    """Positional and keyword tensors, None, int, str and every container, each with tensors of another device."""

    block_names = ("a", "b", "picky", "head")

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.picky = Picky()

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.a(x))
        second = torch.tanh(self.b(first))
        lookup: defaultdict[str, Tensor] = defaultdict(lambda: x.new_zeros(()), known=first)
        total, extra = self.picky(
            second,
            2,
            "add",
            None,
            {"list": [first], "inner": {"value": second}},
            bias=first,
            pair=Pair(first, second),
            frozen=Frozen(first, "kept", {"value": second}),
            lookup=lookup,
            carrier=Carrier(first),
        )
        return self.head(total + extra["x"])


class Appender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        x = torch.tanh(self.linear(x))
        kept.append(x)
        return x


class AppendsToList(Body):
    """Every block appends its output to the caller's list, which the last one reads."""

    block_names = ("layers.0", "layers.1", "layers.2", "head")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Appender() for _ in range(3))
        self.head = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, kept)
        assert len(kept) == 3
        return self.head(torch.cat(kept, -1))


class Writer(nn.Module):
    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        cache[self.key] = torch.tanh(self.linear(x)) + cache.get("0", 0)
        return cache[self.key]


class WritesIntoDict(Body):
    """Blocks write into the caller's dictionary and read what another block wrote."""

    block_names = ("layers.0", "layers.1", "layers.2", "head")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Writer(str(index)) for index in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        cache: dict[str, Tensor] = {}
        for layer in self.layers:
            x = layer(x, cache)
        return self.head(cache["0"] * cache["1"] + cache["2"])


class SelfAttention(nn.Module):
    """Insists that query, key and value are one object, as torch's fast paths do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert query is key
        assert key is value
        return self.attention(query, key, value, need_weights=False)[0]


class SameObjectThrice(Body):
    block_names = ("a", "attention", "c", "d")

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.attention = SelfAttention()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        return self.d(torch.tanh(self.c(self.attention(x, x, x))))


class Changer(nn.Module):
    """Changes its argument in place; the caller goes on to use the changed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5).add_(1.0)
        return self.linear(x)


class ChangesArgument(Body):
    block_names = ("a", "changer", "c", "d")

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.changer = Changer()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.changer(x)
        return self.d(torch.tanh(self.c(torch.tanh(y))) + x)


def vectors(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def sequences(generator: torch.Generator, out: int = WIDTH) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(BATCH, 6, WIDTH, generator=generator)
    targets = torch.randn(BATCH, 3, generator=generator) if out == 3 else torch.randn(inputs.shape, generator=generator)
    return inputs, targets


def tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    text = torch.randint(Gpt.vocabulary, (BATCH, Gpt.time + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 3, 12, 12, generator=generator), torch.randint(5, (BATCH,), generator=generator)


def loader(batches: list[Any]) -> DataLoader[Any]:
    """Ready-made batches, in their order."""
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


class Trained:
    """What a LightningModule adds to a body; needs no Lightning, so `make(nn.Module)` has the same step."""

    optimizer: Callable[[Any], torch.optim.Optimizer]

    def self_balance(self: Any) -> list[str]:
        return list(self.block_names)

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.last_loss = loss.detach()
        return loss

    def configure_optimizers(self: Any) -> torch.optim.Optimizer:
        return type(self).optimizer(self.parameters())


@dataclass(frozen=True)
class Case:
    """One model with its batches."""

    body: type[Body]
    batch: Callable[[torch.Generator], Any]

    def make(self, base: type = nn.Module, optimizer: Callable[[Any], Any] = sgd, seed: int = 0) -> Any:
        """The model on `base` (a LightningModule class of either package, or nn.Module), its weights from `seed`."""
        cls = type(self.body.__name__, (Trained, self.body, base), {"optimizer": staticmethod(optimizer)})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls()

    def batches(self, count: int = 1, seed: int = 1) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        return [self.batch(generator) for _ in range(count)]


CASES: dict[str, Case] = {
    "gpt": Case(Gpt, tokens),
    "tied embedding": Case(TiedGpt, tokens),
    "batch norm convnet": Case(ConvNet, images),
    "residuals across blocks": Case(ResidualsAcrossBlocks, vectors),
    "skip in glue": Case(SkipInGlue, vectors),
    "sum of branches": Case(SumOfBranches, vectors),
    "called twice": Case(CalledTwice, vectors),
    "lstm": Case(Recurrent, lambda generator: sequences(generator, 3)),
    "gru": Case(RecurrentGru, lambda generator: sequences(generator, 3)),
    "many arguments": Case(ManyArguments, vectors),
    "appends to a list": Case(AppendsToList, vectors),
    "writes into a dict": Case(WritesIntoDict, vectors),
    "q is k is v": Case(SameObjectThrice, sequences),
    "changes its argument": Case(ChangesArgument, vectors),
}
