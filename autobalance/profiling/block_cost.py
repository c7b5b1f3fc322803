"""What one block costs: a row of a profile."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from autobalance.devices.roofline import Work


@dataclass(frozen=True)
class BlockCost:
    """What one block costs: bytes of memory and seconds.

    Example:
        >>> BlockCost("layers.0", kind="Linear", weights=4096)

    Attributes:
        name: qualified name in the root module; a group of modules is joined with `+`.
        kind: class name.
        weights, gradients, optimizer, buffers: static bytes.
        inputs, outputs: bytes of the tensors that go in and come out.
        saved: bytes kept from forward to backward.
        forward_transient, backward_transient: most bytes alive only inside one forward or backward.
        forward_time, backward_time: seconds; running the forward again in the backward takes `forward_time` once more.
        optimizer_time: seconds of its share of an optimizer step.
        forward_work, backward_work: operations and bytes moved, from which the time on any device follows.
        dtype: data type of most of its weights.
    """

    name: str
    kind: str = ""
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    inputs: int = 0
    outputs: int = 0
    saved: int = 0
    forward_transient: int = 0
    backward_transient: int = 0
    forward_time: float = 0.0
    backward_time: float = 0.0
    optimizer_time: float = 0.0
    forward_work: tuple[Work, ...] = ()
    backward_work: tuple[Work, ...] = ()
    dtype: str = ""

    @property
    def static(self) -> int:
        """Bytes that stay: weights, gradients, optimizer state and buffers."""
        return self.weights + self.gradients + self.optimizer + self.buffers

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the modules that the block is made of."""
        return tuple(self.name.split("+"))


_BYTES = tuple(column.name for column in fields(BlockCost) if column.type == "int")
_SECONDS = tuple(column.name for column in fields(BlockCost) if column.type == "float")


def between(block: BlockCost, other: BlockCost, way: float) -> BlockCost:
    """The row that lies `way` of the way from one to another, beyond it where `way` is above 1.

    Example:
        >>> between(BlockCost("a", saved=10), BlockCost("a", saved=20), 3.0).saved
        40

    Args:
        block: at 0.
        other: at 1.
        way: where.
    """
    here, there = vars(block), vars(other)
    numbers: dict[str, Any] = dict(here)
    for name in _BYTES:
        numbers[name] = max(0, round(here[name] + way * (there[name] - here[name])))
    for name in _SECONDS:
        numbers[name] = max(0.0, here[name] + way * (there[name] - here[name]))
    for name in ("forward_work", "backward_work"):
        numbers[name] = _work_between(here[name], there[name], way)
    return BlockCost(**numbers)


def _work_between(parts: tuple[Work, ...], others: tuple[Work, ...], way: float) -> tuple[Work, ...]:
    def weigh(part: Work, other: Work, way: float) -> Work:
        pairs = ((part.flops, other.flops), (part.traffic, other.traffic), (part.launches, other.launches))
        return Work(part.arithmetic, *(max(0, round(here + way * (there - here))) for here, there in pairs))

    if [part.arithmetic for part in parts] == [other.arithmetic for other in others]:
        return tuple(weigh(part, other, way) for part, other in zip(parts, others, strict=True))
    # Intensities fell into other classes there: parts of one arithmetic grow as their sums do.
    return tuple(
        Work(
            part.arithmetic,
            flops=round(part.flops * _growth(parts, others, part.arithmetic, "flops", way)),
            traffic=round(part.traffic * _growth(parts, others, part.arithmetic, "traffic", way)),
            launches=round(part.launches * _growth(parts, others, part.arithmetic, "launches", way)),
        )
        for part in parts
    )


def _growth(parts: tuple[Work, ...], others: tuple[Work, ...], arithmetic: str, what: str, way: float) -> float:
    here, there = (sum(getattr(part, what) for part in row if part.arithmetic == arithmetic) for row in (parts, others))
    return max(0.0, 1 + way * (there - here) / here) if here else 1.0
