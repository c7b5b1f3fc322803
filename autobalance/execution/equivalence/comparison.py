"""Loss and gradients of a batch against those of its parts: by which weights they agree, or why they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import torch
from torch import nn

from autobalance.execution.batches.merging import counted
from autobalance.execution.equivalence.few_samples import FewSamples, counts_in
from autobalance.execution.equivalence.gradient_sketch import PRODUCTS, Sketch, length, weighted


class Closeness(NamedTuple):
    """How much results of the same numbers added up in another order may differ, relative to their size.

    Attributes:
        loss: for losses.
        gradient: for gradients of a parameter, as a whole.
    """

    loss: float
    gradient: float

    @classmethod
    def of(cls, precision: str, module: nn.Module) -> Closeness:
        """For a precision as Lightning names it, and the types and devices of a module's parameters.

        Args:
            precision: as Lightning names it.
            module: whose weights count.
        """
        parameters = list(module.parameters())
        smallest = min((each.element_size() for each in parameters if each.is_floating_point()), default=4)
        if smallest < 4 or "16" in precision or "transformer-engine" in precision:
            return cls(1e-2, 5e-2)
        if smallest == 8:
            return cls(1e-9, 1e-7)
        # Kernels that cuDNN and TF32 choose by the size of a batch differ in more than the order of sums.
        on_gpu = any(parameter.device.type == "cuda" for parameter in parameters)
        return cls(1e-3, 5e-3) if on_gpu else cls(1e-5, 1e-4)


@dataclass(frozen=True)
class Results:
    """Of running a step on each of several batches: losses, and sketches of gradients by parameter.

    Attributes:
        losses: one for each batch.
        gradients: one for each batch, by name of the parameter.
    """

    losses: Sequence[float]
    gradients: Sequence[Mapping[str, Sketch]]


class Comparison:
    """A step on the whole of a few samples against weighted sums over their parts.

    Args:
        whole: what the samples gave at once.
        parts: what their parts gave.
        few: the samples.
        close: how close is close enough.
    """

    def __init__(self, whole: Results, parts: Results, few: FewSamples, close: Closeness) -> None:
        self._loss = whole.losses[0]
        self._gradients = whole.gradients[0]
        self._parts = parts
        self._few = few
        self._close = close
        self._shares = few.weights or [size / sum(few.sizes) for size in few.sizes]

    def rule(self) -> str | None:
        """The first that makes loss and gradients agree: "weights" of the user, else "mean" or "sum"; None: no rule."""
        if self._agree(self._shares):
            return "mean" if self._few.weights is None else "weights"
        if self._few.weights is None and self._agree([1.0] * len(self._shares)):
            return "sum"
        return None

    def reason(self) -> str:
        """Why no rule makes them agree."""
        if (by := self._counted()) is not None:
            return (
                f"the loss is no mean over samples. Weighted by `{by}`, parts give what the batch gives: say so "
                f"in the module, def loss_weight(self, batch): return {by}"
            )
        if not all(map(isfinite, [self._loss, *self._parts.losses])):
            return (
                f"a test of the step, in which random numbers are held constant, gives losses of "
                f"{', '.join(f'{loss:.6g}' for loss in [self._loss, *self._parts.losses])} for {self._few}: nothing "
                f"can be compared"
            )
        together = self._weighted_loss(self._shares)
        if not self._is_same_loss(together):
            weights = "" if self._few.weights is None else ", weighted by `loss_weight`"
            return (
                f"the loss couples the samples of a batch: it is {self._loss:.6g} for {sum(self._few.sizes)} of them "
                f"at once, but {together:.6g} on average over {self._few.apart}{weights}. Contrastive losses, "
                f"negatives from the batch, samples that are mixed and normalisation over the batch do so"
            )
        name, share = self._most_different_gradient()
        return (
            f"the gradients couple the samples of a batch: that of `{name}` differs by {share:.2g} of its size between "
            f"{self._few}, though the loss does not"
        )

    @property
    def is_same_but_for_gradients(self) -> bool:
        """Whether the loss agrees as a mean, by weights of the user if there are any."""
        return self._counted() is None and self._is_same_loss(self._weighted_loss(self._shares))

    def _agree(self, weights: Sequence[float]) -> bool:
        return self._is_same_loss(self._weighted_loss(weights)) and all(
            size <= allowed for _, size, allowed in self._differences(weights)
        )

    def _is_same_loss(self, loss: float) -> bool:
        # Signs may cancel in a loss: what is added up sets the scale.
        scale = max(filter(isfinite, map(abs, [self._loss, *self._parts.losses])), default=0.0)
        return isfinite(loss) and abs(loss - self._loss) <= self._close.loss * scale

    def _weighted_loss(self, weights: Sequence[float]) -> float:
        return float(sum(map(counted, self._parts.losses, weights)))

    def _differences(self, weights: Sequence[float]) -> Iterator[tuple[str, float, float]]:
        """Of each gradient: its name, how far the parts' is from the whole's, and how far it may be."""
        together, apart = self._gradients, weighted(self._parts.gradients, weights)
        lengths = {name: length(sketch) for name, sketch in together.items()}
        # Some gradients are nothing but rounding, such as those of biases before a normalisation.
        floor = sum(size**2 for size in lengths.values()) ** 0.5 / 50
        nothing = torch.zeros(PRODUCTS, dtype=torch.float64)
        for name in {**together, **apart}:
            difference = together.get(name, nothing) - apart.get(name, nothing)
            yield name, length(difference), self._close.gradient * (lengths.get(name, 0.0) + floor)

    def _most_different_gradient(self) -> tuple[str, float]:
        name, size, _ = max(self._differences(self._shares), key=lambda each: each[1] / max(each[2], 1e-300))
        return name, size / max(length(self._gradients[name]) if name in self._gradients else size, 1e-300)

    def _counted(self) -> str | None:
        """What the loss is a mean over, as an expression on `batch`, if that is counted in the batch."""
        for expression, counts in counts_in(self._few.parts, self._few.sizes):
            total = sum(counts)
            if total > 0 and min(counts) >= 0 and self._agree([count / total for count in counts]):
                return expression
        return None
