"""What takes the place of a block that a trace cannot run: it makes, keeps and frees the bytes that were measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autobalance import compat
from autobalance.measuring.courier import Courier
from autobalance.measuring.passes import Passes
from autobalance.placement.move import Mover
from autobalance.profiling.work import Phase

Charge = Callable[[Phase, Tensor], None]
"""Told the phase of its work, and a tensor of whoever has done that work."""


def substitute(passes: Passes, args: Any, kwargs: Any, parameters: Sequence[Tensor], charge: Charge) -> Any:
    """Do to a device's memory what a block does, as it was measured.

    Example:
        >>> output = substitute(passes, args, kwargs, list(block.parameters()), charge)  # doctest: +SKIP

    Args:
        passes: what the block took when it ran for real on inputs of the same shapes.
        args, kwargs: what it is given in the trace.
        parameters: the block's own.
        charge: told when it works.

    Returns:
        What the block returns, without numbers.
    """
    inputs: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        inputs.append(tensor)
        return tensor

    Mover(Courier(collect), "substitute").move((args, kwargs))
    outputs = _Substitute.apply(_Measured(passes, len(inputs), charge), *inputs, *parameters)  # type: ignore[no-untyped-call]  # torch's own
    found = iter(outputs)
    return Mover(Courier(lambda like: next(found)), "trace").move(passes.returned.template)


@dataclass(frozen=True)
class _Measured:
    passes: Passes
    inputs: int
    charge: Charge

    @property
    def work_in_forward(self) -> int:
        """Bytes beside inputs, outputs and what is kept."""
        took = self.passes
        return max(0, took.forward_peak - took.inputs - took.outputs - took.kept)

    @property
    def rise_in_backward(self) -> int:
        """Most bytes above those at its start, where the gradients of the outputs are there already."""
        took = self.passes
        return max(0, took.backward_peak - took.saved - took.output_gradients)


class _Substitute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, measured: _Measured, *tensors: Tensor) -> tuple[Tensor, ...]:
        took = measured.passes
        anchor = _anchor(tensors)
        outputs = _made(took, tensors[: measured.inputs], anchor)
        # What has to be gone before the gradients are there, so that the peak is the measured one.
        early = min(took.kept, max(0, took.gradients - measured.rise_in_backward))
        if compat.saved_tensor_hooks_are_active():  # a checkpoint decides itself what stays
            early = 0
        ctx.early = _bytes(anchor, early)
        late = _bytes(anchor, took.kept - early)
        _bytes(anchor, measured.work_in_forward)
        kept = [tensor for tensor, saved in zip(tensors, took.saves_inputs, strict=False) if saved]
        kept += [output for output, shape in zip(outputs, took.returned.shapes, strict=True) if shape.saved]
        ctx.save_for_backward(*kept, *late)
        ctx.measured = measured
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        ctx.mark_non_differentiable(
            *(made for made, shape in zip(outputs, took.returned.shapes, strict=True) if not shape.differentiable)
        )
        ctx.set_materialize_grads(False)
        measured.charge("forward", anchor)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        measured, took = ctx.measured, ctx.measured.passes
        anchor = next(gradient for gradient in gradients if gradient is not None)
        kept = ctx.saved_tensors  # under a checkpoint this makes them again
        ctx.early.clear()
        given = (*took.returns_gradient, *took.trains)
        made = [
            anchor.new_empty(shape, dtype=dtype) if wanted and needed else None
            for (shape, dtype), wanted, needed in zip(ctx.shapes, given, ctx.needs_input_grad[1:], strict=True)
        ]
        early = max(0, took.gradients - measured.rise_in_backward)
        _bytes(anchor, max(0, measured.rise_in_backward + min(took.kept, early) - took.gradients))
        del kept
        measured.charge("backward", anchor)
        return None, *made


def _anchor(tensors: Sequence[Tensor]) -> Tensor:
    """A tensor on the device of the block: what is made like it is charged to the block."""
    return next((tensor for tensor in reversed(tensors) if tensor.device.type != "cpu"), tensors[-1])


def _bytes(anchor: Tensor, nbytes: int) -> list[Tensor]:
    return [anchor.new_empty(nbytes, dtype=torch.uint8)] if nbytes else []


def _made(took: Passes, inputs: Sequence[Tensor], anchor: Tensor) -> list[Tensor]:
    """The outputs: new ones, and those that are inputs."""
    storages: dict[int, Tensor] = {}
    outputs = []
    for shape in took.returned.shapes:
        like = shape.like
        if shape.given is not None:
            source = inputs[shape.given]
            same = source.shape == like.shape and source.stride() == like.stride()
            outputs.append(source if same else source.as_strided(like.shape, like.stride(), source.storage_offset()))
            continue
        if shape.storage not in storages:
            elements = -(-took.returned.storages[shape.storage] // like.element_size())
            where = "cpu" if shape.on_host else anchor.device
            storages[shape.storage] = anchor.new_empty(elements, dtype=like.dtype, device=where)
        outputs.append(storages[shape.storage].as_strided(like.shape, like.stride(), like.storage_offset()))
    return outputs
