"""Random models that are trained in every way at once: what one seed draws is a recipe, and the recipe makes the model.

    recipe = draw_recipe(7)
    model = recipe.make(LightningModule)        # or make(): training_step(batch, 0) -> loss works as well
    batches = recipe.batches(20)

A model is a list of steps. Each calls a block, maybe one that was called before, or is an operation between blocks;
both may use what any step before has left.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.random_blocks import CLASSES, TIME, WIDTH, make_block
from tests.random_steps import BETWEEN, PACKED, SHARED, SINGLE, Flow, Step, run_step

FORMS = ("tuple", "dict", "nested")
"""Of a batch."""
REDUCTIONS = ("mean", "sum", "weighted")
"""Of the losses of samples to that of a batch."""


class Net(nn.Module):
    """The model of a recipe; `loss(batch)` is that of its samples, reduced as the recipe says."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.blocks = nn.ModuleList(make_block(kind, recipe.dropout) for kind in recipe.blocks)
        self.dropout = nn.Dropout(recipe.dropout)
        kinds = {step.kind for step in recipe.steps}
        # A parameter that is never used would be planned for, lest it be used later.
        if "scale" in kinds:
            self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        if "shift" in kinds:
            self.shift = nn.Parameter(torch.randn(WIDTH) * 0.1)
        for first, second in recipe.tied:
            _weight_holder(self.blocks[second]).weight = _weight_holder(self.blocks[first]).weight
        for index in recipe.frozen:
            self.blocks[index].requires_grad_(False)

    def forward(self, inputs: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        flow = Flow([inputs], mask)
        for step in self.recipe.steps:
            flow.outputs.append(run_step(self, step, flow))
        return flow.outputs[-1], flow.auxiliary

    def loss(self, batch: Any) -> Tensor:
        inputs, mask, targets, weights = fields_of(batch)
        output, auxiliary = self(inputs, mask)
        losses = F.cross_entropy(output.transpose(1, 2), targets, reduction="none").mean(1)
        for other in auxiliary:
            distances = F.mse_loss(other, F.one_hot(targets, CLASSES).float(), reduction="none")
            losses = losses + 0.3 * distances.mean((1, 2))
        if self.recipe.reduction == "weighted":
            return (losses * weights).sum() / weights.sum()
        return losses.sum() if self.recipe.reduction == "sum" else losses.mean()


class Trained:
    """What a LightningModule adds to the model; needs no Lightning."""

    def self_balance(self: Any) -> list[str]:
        return list(self.recipe.block_names)

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(batch)
        if hasattr(self, "log") and self.recipe.seed % 3 == 0:
            self.log("loss", loss, batch_size=len(fields_of(batch)[0]))
        return loss

    def configure_optimizers(self: Any) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [{"params": trained[::2]}, {"params": trained[1::2], "lr": 0.02}]
        return OPTIMIZERS[self.recipe.optimizer](groups)


class Weighted(Trained):
    """Says how much a part of a batch weighs."""

    def loss_weight(self: Any, batch: Any) -> float:
        return float(fields_of(batch)[3].sum())


# Sums of squares of gradients that are next to nothing are kept from deciding the size of a step: rounding decides
# these gradients.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, eps=1e-2),
}


@dataclass(frozen=True)
class Recipe:
    """Everything that makes a model.

    Attributes:
        seed: that it was drawn from; of its weights, too.
        steps: in order, the head last.
        blocks: kind of each block, in the order of their first calls.
        tied: pairs of blocks with one weight.
        frozen: blocks that do not learn.
        dropout: probability.
        is_text: whether inputs are tokens, else vectors.
        form: of a batch.
        reduction: of losses.
        optimizer: by name.
        autocast: whether steps compute in bfloat16.
        samples: in a batch.
    """

    seed: int
    steps: tuple[Step, ...]
    blocks: tuple[str, ...]
    tied: tuple[tuple[int, int], ...]
    frozen: tuple[int, ...]
    dropout: float
    is_text: bool
    form: str
    reduction: str
    optimizer: str
    autocast: bool
    samples: int

    @property
    def block_names(self) -> tuple[str, ...]:
        """Of each block, in the order of their first calls."""
        return tuple(f"blocks.{index}" for index in range(len(self.blocks)))

    def make(self, base: type = nn.Module) -> Any:
        """The model on `base`, a LightningModule class of either package or `nn.Module`; its weights from the seed."""
        trained = Weighted if self.reduction == "weighted" else Trained
        cls = type("RandomModel", (trained, Net, base), {})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return cls(self)

    def batches(self, count: int) -> list[Any]:
        """Batches, each of other samples."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return [self._batch(generator) for _ in range(count)]

    def _batch(self, generator: torch.Generator) -> Any:
        shape = self.samples, TIME
        tokens = torch.randint(CLASSES, shape, generator=generator)
        vectors = torch.randn(*shape, WIDTH, generator=generator)
        mask = torch.rand(shape, generator=generator) < 0.7
        targets = torch.randint(CLASSES, shape, generator=generator)
        weights = torch.randint(1, 6, (self.samples,), generator=generator).float()
        inputs = tokens if self.is_text else vectors
        if self.form == "tuple":
            return inputs, mask, targets, weights
        if self.form == "dict":
            return {"inputs": inputs, "mask": mask, "targets": targets, "weights": weights}
        return {"inputs": {"ids": inputs, "mask": mask}, "answers": [targets, weights], "source": "drawn", "epoch": 0}


def fields_of(batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, mask, targets and weights of a batch, or of a part of one, whatever its form.

    Example:
        >>> inputs, mask, targets, weights = fields_of(batch)

    Args:
        batch: of a recipe.
    """
    if not isinstance(batch, dict):
        inputs, mask, targets, weights = batch
        return inputs, mask, targets, weights
    if "answers" in batch:
        return batch["inputs"]["ids"], batch["inputs"]["mask"], batch["answers"][0], batch["answers"][1]
    return batch["inputs"], batch["mask"], batch["targets"], batch["weights"]


def draw_recipe(seed: int) -> Recipe:
    """What a seed draws.

    Example:
        >>> draw_recipe(7).blocks

    Args:
        seed: any.
    """
    draw = random.Random(seed)
    is_text = draw.random() < 0.5
    blocks = ["embedding"] if is_text else []
    steps = [Step("embedding", 0)] if is_text else []
    for _ in range(draw.randint(4, 10)):
        steps.append(_draw_step(draw, steps, blocks))
    while len(blocks) < 4:
        blocks.append("dense")
        steps.append(Step("dense", len(blocks) - 1))
    if draw.random() < 0.4:
        blocks.append("head")
        steps.insert(draw.randint(len(steps) // 2, len(steps)), Step("auxiliary", len(blocks) - 1))
    blocks.append("head")
    steps.append(Step("head", len(blocks) - 1))
    steps, blocks = _in_order_of_calls(steps, blocks)
    return Recipe(
        seed,
        tuple(steps),
        tuple(blocks),
        tied=_draw_ties(draw, blocks),
        frozen=_draw_frozen(draw, blocks),
        dropout=draw.choice([0.0, 0.0, 0.2]),
        is_text=is_text,
        form=draw.choice(FORMS),
        reduction=draw.choice(("mean", *REDUCTIONS)),
        optimizer=draw.choice(list(OPTIMIZERS)),
        autocast=draw.random() < 0.25,
        samples=draw.randint(4, 12),
    )


def _draw_step(draw: random.Random, steps: list[Step], blocks: list[str]) -> Step:
    # Tokens are no vectors: no step uses them but the embedding.
    skip = draw.randint(1 if blocks[:1] == ["embedding"] else 0, len(steps))
    again = [step for step in steps if step.kind in SHARED]
    chance = draw.random()
    if chance < 0.35 and steps:
        return Step(draw.choice(BETWEEN), skip=skip)
    if chance < 0.45 and again:
        called = draw.choice(again)
        return Step(called.kind, called.block, skip, called.checkpointed)
    kind = draw.choice((*SINGLE, *SINGLE, *PACKED))
    blocks.append(kind)
    is_checkpointed = kind in SHARED and draw.random() < 0.25
    return Step(kind, len(blocks) - 1, skip, is_checkpointed)


def _in_order_of_calls(steps: list[Step], blocks: list[str]) -> tuple[list[Step], list[str]]:
    """Number blocks by their first calls, which a head in the middle has disturbed, and skips by what stands before."""
    order = list(dict.fromkeys(step.block for step in steps if step.block is not None))
    renamed = [
        Step(
            step.kind,
            None if step.block is None else order.index(step.block),
            min(step.skip, position),
            step.checkpointed,
        )
        for position, step in enumerate(steps)
    ]
    return renamed, [blocks[index] for index in order]


def _draw_ties(draw: random.Random, blocks: list[str]) -> tuple[tuple[int, int], ...]:
    """The head's weight is the embedding's, or two blocks of one kind share theirs."""
    if blocks[0] == "embedding" and draw.random() < 0.3:
        return ((0, len(blocks) - 1),)
    dense = [index for index, kind in enumerate(blocks) if kind == "dense"]
    return ((dense[0], dense[-1]),) if len(dense) > 1 and draw.random() < 0.3 else ()


def _draw_frozen(draw: random.Random, blocks: list[str]) -> tuple[int, ...]:
    """A run of blocks at the start, in the middle or at the end, or none; never all."""
    where, count = draw.choice(["", "", "", "start", "middle", "end"]), draw.randint(1, len(blocks) // 2)
    first = {"": 0, "start": 0, "middle": len(blocks) // 3, "end": len(blocks) - count}[where]
    return tuple(range(first, first + count)) if where else ()


def _weight_holder(block: Any) -> Any:
    return block if hasattr(block, "weight") else block.linear
