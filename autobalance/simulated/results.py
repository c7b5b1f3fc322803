"""Results whose storage is not what their shape says, as CUDA's kernels leave them, whether elements are real or fake.

A kernel that computes in its result's own storage and then shrinks the result leaves a storage as large as what it
computed; a fake of the result has only what its shape needs. Sources, torch 2.13: Loss.cpp, Im2Col.cu, Col2Im.cu,
EmbeddingBag.cu, MaxUnpooling.cu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autobalance import compat
from autobalance.simulated import dispatch, elements, fakes, ledger
from autobalance.simulated.dispatch import Call, carry_out, emulate

_aten = torch.ops.aten


def register() -> None:
    """Let the operators of this module be carried out by kernels that leave what CUDA's leave."""
    for func, kernel in AS_ON_CUDA.items():
        emulate(func, kernel)
    carry_out(_aten._ctc_loss.Tensor, _ctc_loss_of_tensors)
    carry_out(_aten.lift_fresh.default, _lift_fresh)


def _of_both(first: Tensor, second: Tensor, *rest: Any, **options: Any) -> int:
    elements_computed: int = torch.broadcast_shapes(first.shape, second.shape).numel()
    return elements_computed


def _of_first(first: Tensor, *rest: Any, **options: Any) -> int:
    return first.numel()


COMPUTED_IN_PLACE: dict[Any, Callable[..., int]] = {
    _aten.mse_loss.default: _of_both,
    _aten.smooth_l1_loss.default: _of_both,
    _aten.binary_cross_entropy.default: _of_first,
    _aten.soft_margin_loss.default: _of_first,
    _aten.im2col.default: _of_first,
    _aten.col2im.default: _of_first,
}
"""Operators that compute in their result's storage, reduced losses among them, and how many elements they compute."""


def _leaving_storage(func: Any, computed: Callable[..., int]) -> Callable[..., Tensor]:
    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = func(*args, **kwargs)
        storage = result.untyped_storage()
        wanted = computed(*args, **kwargs) * result.itemsize
        if compat.is_fake(result) and storage.nbytes() < wanted:
            storage.resize_(wanted)
        return result

    return kernel


def _embedding_bag(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return _without_spare_offset(_aten._embedding_bag.default(*args, **kwargs))


def _embedding_bag_forward_only(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return _without_spare_offset(_aten._embedding_bag_forward_only.default(*args, **kwargs))


def _without_spare_offset(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The CPU's kernel leaves room for one offset more than CUDA's."""
    output, *indices = results
    return (output, *(index.clone() for index in indices))


def _max_unpool2d(*args: Any, **kwargs: Any) -> Tensor:
    """CUDA's kernel always gives a contiguous result; the CPU's follows its input."""
    result: Tensor = _aten.max_unpool2d.default(*args, **kwargs)
    return result.contiguous()


def _ctc_loss(log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, *rest: Any, **options: Any) -> Any:
    """Its shapes depend on the lengths of the targets only, which are numbers."""
    if not compat.is_fake(log_probs):
        return _aten._ctc_loss.default(log_probs, targets, inputs, lengths, *rest, **options)
    time, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, 2 * max(lengths, default=0) + 1)


def _grouped_mm(left: Tensor, right: Tensor, offsets: Tensor | None = None, *rest: Any, **options: Any) -> Tensor:
    """Kernels take every type, torch's rule for fakes bfloat16 only."""
    if not compat.is_fake(left) or left.dtype is torch.bfloat16:
        result: Tensor = _aten._grouped_mm.default(left, right, offsets, *rest, **options)
        return result
    groups: tuple[int, ...] = ()  # rows of one result, unless every group has one of its own
    if left.dim() == right.dim():
        groups = left.shape[:1] if offsets is None else offsets.shape
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]))


AS_ON_CUDA: dict[Any, Callable[..., Any]] = {
    **{func: _leaving_storage(func, computed) for func, computed in COMPUTED_IN_PLACE.items()},
    _aten._embedding_bag.default: _embedding_bag,
    _aten._embedding_bag_forward_only.default: _embedding_bag_forward_only,
    _aten.max_unpool2d.default: _max_unpool2d,
    _aten._ctc_loss.default: _ctc_loss,
    _aten._grouped_mm.default: _grouped_mm,
}
"""Operators, and kernels on elements that leave what CUDA's leave."""


def _ctc_loss_of_tensors(func: Any, args: Any, kwargs: Any) -> Any:
    log_probs, targets, *lengths = args[:4]
    if elements.fake_mode is not None:
        known = [fakes.known_of(length) for length in lengths]
        numbers = [[int(number) for number in length] for length in known if length is not None]
        if len(numbers) < len(lengths):
            raise RuntimeError("the lengths that ctc_loss is given are not known while elements are fake")
        return dispatch.run(_aten._ctc_loss.default, (log_probs, targets, *numbers, *args[4:]), kwargs)
    return Call(func, args, kwargs).run(func)


def _lift_fresh(func: Any, args: Any, kwargs: Any) -> Any:
    """What `torch.tensor(data, device=...)` ends with; it fills real elements even while elements are to be fake."""
    (made,) = args
    if elements.fake_mode is not None and not compat.is_fake(made.elements):
        value = made.elements.detach().clone()
        made.elements = elements.fake_like(value)  # the real storage dies before the fake one is counted
        ledger.note(made.elements.untyped_storage(), made.account)
        elements.remember(made, made.elements, value)
    return Call(func, args, kwargs).run(_aten.alias.default)
