"""Steps of random models: each calls a block, or is an operation between blocks, and uses what others left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.random_blocks import CONTAINERS, WIDTH, pack, unpack

SINGLE = ("dense", "attention", "convolution", "norm", "lstm", "gru", "keyed", "appender", "writer")
PACKED = tuple(f"packed {kind}" for kind in CONTAINERS)
SHARED = ("dense", "attention", "convolution", "keyed")
"""Blocks that may be called again, and recomputed by the user's own checkpointing."""
BETWEEN = ("add", "cat", "stack", "scale", "shift", "mask", "where", "detached", "in place", "gather", "dropout")
"""Operations between blocks."""


@dataclass(frozen=True)
class Step:
    """One step of a model.

    Attributes:
        kind: of the block that it calls, or the operation between blocks.
        block: index of the block; None for an operation between blocks.
        skip: index of the earlier step whose output it uses beside that of the last.
        checkpointed: whether the user recomputes it in the backward.
    """

    kind: str
    block: int | None = None
    skip: int = 0
    checkpointed: bool = False


@dataclass
class Flow:
    """What steps hand on to later ones.

    Attributes:
        outputs: of every step so far.
        mask: (samples, TIME), where a sample has something to say.
        kept, cache: that blocks change in place.
        states: of recurrent blocks, by their kind.
        auxiliary: outputs of the heads in the middle.
    """

    outputs: list[Tensor]
    mask: Tensor
    kept: list[Tensor] = field(default_factory=list)
    cache: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    auxiliary: list[Tensor] = field(default_factory=list)


def run_step(net: Any, step: Step, flow: Flow) -> Tensor:
    """Run one step.

    Example:
        >>> output = run_step(net, Step("dense", block=0), Flow([inputs], mask))

    Args:
        net: has `blocks`, and the parameters `scale` and `shift` and a `dropout` outside of them.
        step: what to run.
        flow: what the steps before have left; what blocks change in place changes in it.

    Returns:
        The output that later steps see as the last.
    """
    return _RUNS.get(step.kind, _call)(net, step, flow)


def _run_block(net: Any, step: Step, *args: Any, **kwargs: Any) -> Any:
    assert step.block is not None
    block = net.blocks[step.block]
    return checkpoint(block, *args, use_reentrant=False, **kwargs) if step.checkpointed else block(*args, **kwargs)


def _call(net: Any, step: Step, flow: Flow) -> Tensor:
    return _run_block(net, step, flow.outputs[-1])


def _recurrent(net: Any, step: Step, flow: Flow) -> Tensor:
    output, flow.states[step.kind] = _run_block(net, step, flow.outputs[-1], flow.states.get(step.kind))
    return output


def _packed(net: Any, step: Step, flow: Flow) -> Tensor:
    kind = step.kind.removeprefix("packed ")
    output, skip = unpack(kind, _run_block(net, step, pack(kind, flow.outputs[-1], flow.outputs[step.skip])))
    return output + 0.1 * skip


def _keyed(net: Any, step: Step, flow: Flow) -> Tensor:
    output, nothing, more = _run_block(net, step, flow.outputs[-1], 0.5, bias=flow.outputs[step.skip])
    assert nothing is None
    assert more["state"] is None
    return output - 0.1 * more["bias"]


def _append(net: Any, step: Step, flow: Flow) -> Tensor:
    return _run_block(net, step, flow.outputs[-1], flow.kept)


def _write(net: Any, step: Step, flow: Flow) -> Tensor:
    return _run_block(net, step, flow.outputs[-1], flow.cache) + flow.cache["last"]


def _auxiliary(net: Any, step: Step, flow: Flow) -> Tensor:
    flow.auxiliary.append(_run_block(net, step, flow.outputs[-1]))
    return flow.outputs[-1]


def _cat(net: Any, step: Step, flow: Flow) -> Tensor:
    return torch.cat([flow.outputs[-1], flow.outputs[step.skip]], -1).unflatten(-1, (2, WIDTH)).mean(-2)


def _in_place(net: Any, step: Step, flow: Flow) -> Tensor:
    x = flow.outputs[-1].clone()
    x += flow.outputs[step.skip]
    return x.mul_(0.5)


def _gather(net: Any, step: Step, flow: Flow) -> Tensor:
    return torch.stack([flow.outputs[-1], *flow.kept]).mean(0)


_RUNS: dict[str, Callable[[Any, Step, Flow], Tensor]] = {
    "lstm": _recurrent,
    "gru": _recurrent,
    **dict.fromkeys(PACKED, _packed),
    "keyed": _keyed,
    "appender": _append,
    "writer": _write,
    "auxiliary": _auxiliary,
    "add": lambda net, step, flow: flow.outputs[-1] + flow.outputs[step.skip],
    "cat": _cat,
    "stack": lambda net, step, flow: torch.stack([flow.outputs[step.skip], flow.outputs[-1]], 2).mean(2),
    "scale": lambda net, step, flow: flow.outputs[-1] * net.scale,
    "shift": lambda net, step, flow: torch.tanh(flow.outputs[step.skip] + net.shift) + flow.outputs[-1],
    "mask": lambda net, step, flow: flow.outputs[-1].masked_fill(~flow.mask.unsqueeze(-1), 0.0),
    "where": lambda net, step, flow: torch.where(
        flow.mask.unsqueeze(-1), flow.outputs[-1], flow.outputs[step.skip] * 0.5
    ),
    "detached": lambda net, step, flow: flow.outputs[-1] + flow.outputs[step.skip].detach(),
    "in place": _in_place,
    "dropout": lambda net, step, flow: net.dropout(flow.outputs[-1]),
    "gather": _gather,
}
