"""How other tools split a model over equal devices, each called as its manual says, with all that it can be told.

accelerate and transformers know the sizes of modules and the memory of the devices; torchgpipe balances one cost per
block, here the one that it would measure; the even split knows how many layers there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from large_models import Large
from torch import nn

import autobalance
from autobalance import Profile
from autobalance.devices.words import parse_devices
from autobalance.partitioning.times import block_seconds

ADAM_COPIES = 4.0
"""`param_scale` that torchgpipe's manual gives for Adam."""


class NoSplit(Exception):
    """The tool gives no split, for the reason in the text."""


@dataclass(frozen=True)
class Question:
    """What a tool is asked.

    Attributes:
        large: the model.
        module: it, built.
        profile: of a batch.
        single: of a batch of one sample.
        devices: how many.
        capacity: bytes of each.
    """

    large: Large
    module: nn.Module = field(compare=False)
    profile: Profile
    single: Profile
    devices: int
    capacity: int

    @property
    def whole(self) -> list[str]:
        """Class names of modules that must not be split."""
        known = getattr(self.module, "_no_split_modules", None) or ()
        return sorted({*known, *self.large.layers})

    @property
    def max_memory(self) -> dict[int | str, int | str]:
        """Capacities as accelerate takes them."""
        return dict.fromkeys(range(self.devices), self.capacity)


def by_accelerate(question: Question) -> tuple[int, ...]:
    """`infer_auto_device_map` with `get_balanced_memory`: what `device_map="balanced"` does."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    memory = get_balanced_memory(question.module, question.max_memory, no_split_module_classes=question.whole)
    return _placed(question, infer_auto_device_map(question.module, memory, no_split_module_classes=question.whole))


def by_transformers(question: Question) -> tuple[int, ...]:
    """The functions of transformers' own that `from_pretrained(device_map="balanced")` calls."""
    from transformers.integrations.accelerate import get_balanced_memory, infer_auto_device_map

    whole = set(question.whole)
    module: Any = question.module
    tied: list[list[str]] | None = None if hasattr(module, "all_tied_weights_keys") else []
    memory = get_balanced_memory(module, question.max_memory, no_split_module_classes=whole)
    found = infer_auto_device_map(module, memory, no_split_module_classes=whole, tied_parameters=tied)
    return _placed(question, found)


def by_one_device(question: Question) -> tuple[int, ...]:
    """Everything on the first, which moves nothing."""
    return (0,) * len(question.profile.blocks)


def by_even_layers(question: Question) -> tuple[int, ...]:
    """As a `pp_size` of transformers has it: layers evenly, what comes before them first, what comes after last."""
    from transformers.distributed.pipeline_parallel import PipelineStage

    blocks = question.profile.blocks
    layers = [index for index, block in enumerate(blocks) if block.kind in question.large.layers]
    layers = layers or list(range(len(blocks)))
    stage: Any = SimpleNamespace(pp_size=question.devices)
    assignment = [0] * len(blocks)
    for rank in range(question.devices):
        start, stop = PipelineStage.layer_range_for_rank(stage, rank, len(layers))
        for layer in layers[start:stop]:
            assignment[layer:] = [rank] * (len(blocks) - layer)
    return _tied(question, assignment)


def by_size(question: Question) -> tuple[int, ...]:
    """torchgpipe's `balance_by_size`: what a forward of one sample leaves, times samples, and copies of weights."""
    copies = ADAM_COPIES if question.profile.training else 1.0
    rows = zip(question.single.blocks, question.profile.blocks, strict=True)
    samples = question.profile.batch_size
    return _by_cost(question, [int(max(one.saved, one.outputs) * samples + row.weights * copies) for one, row in rows])


def by_time(question: Question) -> tuple[int, ...]:
    """torchgpipe's `balance_by_time`: seconds of a forward and a backward, in whole nanoseconds."""
    devices = parse_devices([question.capacity] * question.devices)
    forward, backward = block_seconds(question.profile, devices[0], devices)
    return _by_cost(question, [int(seconds * 1e9) for seconds in forward + backward])


def _by_cost(question: Question, costs: Sequence[int]) -> tuple[int, ...]:
    from torchgpipe.balance import balance_cost

    try:
        counts: list[int] = balance_cost(list(costs), question.devices)
    except ValueError as error:
        raise NoSplit(str(error)) from None
    return _tied(question, [device for device, count in enumerate(counts) for _ in range(count)])


def _placed(question: Question, device_map: Mapping[str, int | str]) -> tuple[int, ...]:
    """The device of every block."""
    outside = [name for name, device in device_map.items() if device in ("cpu", "disk")]
    if outside:
        raise NoSplit(f"offloads {len(outside)} modules, {outside[0]} first")
    devices = [question.capacity] * question.devices
    try:
        return autobalance.score(question.profile, device_map, devices).assignment
    except ValueError as error:
        raise NoSplit(str(error)) from None


def _tied(question: Question, assignment: Sequence[int]) -> tuple[int, ...]:
    """With blocks that must share a device, as these tools do not know, on the one of theirs that turns out best."""
    best = tuple(assignment)
    for group in question.profile.together:
        tried = []
        for device in sorted({best[block] for block in group}):
            joined = tuple(device if block in group else place for block, place in enumerate(best))
            found = autobalance.score(question.profile, joined, [question.capacity] * question.devices)
            tried.append((max(found.peaks), joined))
        best = min(tried)[1]
    return best


Splitter = Callable[[Question], tuple[int, ...]]
OTHERS: dict[str, Splitter] = {
    "one device": by_one_device,
    "accelerate": by_accelerate,
    "transformers": by_transformers,
    "even layers": by_even_layers,
    "torchgpipe, size": by_size,
    "torchgpipe, time": by_time,
}


def quiet() -> None:
    """Devices that are only talked about are missed by accelerate, at each call."""
    import logging
    import warnings

    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
