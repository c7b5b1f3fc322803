"""Which attention kernel a GPU chooses, and what it computes with.

The conditions are those of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h, the padding and
the masks those of aten/src/ATen/native/transformers/attention.cpp.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from autobalance import compat
from autobalance.kernels import table
from autobalance.kernels.target import Target

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_MOST_BATCHES_OF_CUDNN = 65535


@dataclass(frozen=True)
class Attention:
    """One call of `scaled_dot_product_attention`, with a batch dimension if its kernels want one.

    Attributes:
        query, key, value: (batch, heads, length, head).
        mask: boolean or additive, None for none.
        dropout: probability.
        causal: whether later keys are hidden.
        grouped: whether fewer key heads than query heads are meant.
        target: the GPU.
        release: of torch.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    grouped: bool
    target: Target
    release: tuple[int, int]

    def knows(self, fact: table.Table) -> Any:
        """What a table says about this GPU and this torch.

        Args:
            fact: a table of what kernels do.
        """
        return fact.value(self.target, self.release)

    @property
    def trains(self) -> bool:
        """Whether gradients will be asked for."""
        needed = any(tensor.requires_grad for tensor in (self.query, self.key, self.value))
        return needed and torch.is_grad_enabled()


def choose(call: Attention) -> str:
    """The kernel that the GPU runs: "flash", "efficient", "cudnn" or "math".

    Args:
        call: the arguments and the GPU.

    Raises:
        RuntimeError: every kernel that could is switched off.
    """
    for backend in compat.attention_order(cudnn_first=_prefers_cudnn(call)):
        if backend == "math" and torch.backends.cuda.math_sdp_enabled():
            return backend
        if backend in _CAN and _CAN[backend](call):
            return backend
    raise RuntimeError(
        f"no attention kernel that is switched on takes query {tuple(call.query.shape)} of {call.query.dtype} on "
        f"{call.target.name}; allow SDPBackend.MATH in torch.nn.attention.sdpa_kernel"
    )


def _prefers_cudnn(call: Attention) -> bool:
    return bool(call.knows(table.CUDNN_FIRST)) and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"


def _can_flash(call: Attention) -> bool:
    head = call.query.shape[-1]
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and call.query.dim() == 4
        and call.mask is None
        and head == call.key.shape[-1] == call.value.shape[-1]
        and head <= 256
        and bool(call.knows(table.FLASH))
        and _trains_with_head(call, head)
        and (not call.causal or call.query.shape[-2] == call.key.shape[-2])
        and _is_half(call)
        and _heads_match(call, groups=True)
        and _is_dense(call, one_wide_head=True)
    )


def _trains_with_head(call: Attention, head: int) -> bool:
    small = (8, 6) <= call.target.capability <= (8, 9) or (12, 0) <= call.target.capability <= (12, 1)
    return not (small and call.trains) or head <= 192 or (head > 224 and call.dropout == 0)


def _can_efficient(call: Attention) -> bool:
    sixteen, thirty_two = call.knows(table.EFFICIENT_ALIGNMENT)
    alignment = sixteen if call.query.dtype in _HALF else thirty_two
    head, of_value = call.query.shape[-1], call.value.shape[-1]
    types = (torch.float32, torch.float16, *((torch.bfloat16,) if call.knows(table.BF16) else ()))
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and call.query.dim() == 4
        and head == call.key.shape[-1]
        and head % alignment == 0
        and of_value % alignment == 0
        and head > 0
        and of_value > 0
        and _has_type(call, types)
        and _is_dense(call, one_wide_head=False)
        and _heads_match(call, groups=bool(call.knows(table.EFFICIENT_GROUPED)))
    )


def _can_cudnn(call: Attention) -> bool:
    if call.query.dim() != 4:
        return False
    batch, heads, queries, head = call.query.shape
    keys, of_value = call.value.shape[-2:]
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and bool(call.knows(table.CUDNN))
        and _is_half(call)
        and _mask_fits(call)
        and (call.dropout * 16).is_integer()
        and _is_dense(call, one_wide_head=True)
        and _heads_match(call, groups=True, same=False)
        and batch <= _MOST_BATCHES_OF_CUDNN
        and heads <= _MOST_BATCHES_OF_CUDNN
        and max(head, of_value) <= call.knows(table.CUDNN_HEAD)
        and head % 8 == 0
        and of_value % 8 == 0
        and keys != 1
        and (call.dropout == 0 or queries != 1)
    )


_CAN: dict[str, Callable[[Attention], bool]] = {
    "flash": _can_flash,
    "efficient": _can_efficient,
    "cudnn": _can_cudnn,
}


def _has_type(call: Attention, types: tuple[torch.dtype, ...]) -> bool:
    return call.query.dtype in types and call.query.dtype == call.key.dtype == call.value.dtype


def _is_half(call: Attention) -> bool:
    return _has_type(call, _HALF if call.knows(table.BF16) else (torch.float16,))


def _heads_match(call: Attention, groups: bool, same: bool = True) -> bool:
    of_query, of_key, of_value = (tensor.shape[-3] for tensor in (call.query, call.key, call.value))
    if not call.query.shape[0] == call.key.shape[0] == call.value.shape[0]:
        return False
    if groups and call.grouped:
        return (of_key == of_value or not same) and of_query % of_key == 0 and of_query % of_value == 0
    if groups and call.knows(table.ONE_KEY_HEAD) and of_key == of_value == 1:
        return True
    return of_query == of_key == of_value


def _is_dense(call: Attention, one_wide_head: bool) -> bool:
    tensors = (call.query, call.key, call.value)
    if call.query.shape[-2] == 0 or call.key.shape[-2] == 0:
        return False
    rows = all(tensor.stride(-1) == 1 for tensor in tensors) or (one_wide_head and call.query.shape[-1] == 1)
    return rows and (call.mask is None or call.mask.stride(-1) == 1)


def _mask_fits(call: Attention) -> bool:
    mask = call.mask
    if mask is None:
        return True
    wanted = (call.query.shape[0], call.query.shape[1], call.query.shape[2], call.key.shape[2])
    sizes = tuple(mask.shape)
    fits = all(size in (1, full) for size, full in zip(sizes, wanted[-len(sizes) :], strict=True))
    return not mask.requires_grad and len(sizes) in (2, 4) and fits


def attend(call: Attention, scale: float | None) -> Tensor:
    """Compute it by the kernel that the GPU chooses.

    Args:
        call: the arguments and the GPU.
        scale: of the scores; None: one over the root of the head.
    """
    unbatched = bool(call.knows(table.UNBATCHED)) and call.query.dim() == call.key.dim() == call.value.dim() == 3
    if unbatched:
        call = _with_batch(call)
    result = _BY[choose(call)](call, scale)
    return result.squeeze(0) if unbatched else result


def _with_batch(call: Attention) -> Attention:
    mask = call.mask
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    query, key, value = (tensor.unsqueeze(0) for tensor in (call.query, call.key, call.value))
    return Attention(
        query, key, value, mask, call.dropout, call.causal, call.grouped, target=call.target, release=call.release
    )


def _flash(call: Attention, scale: float | None) -> Tensor:
    head = call.query.shape[-1]
    scale = 1 / math.sqrt(head) if scale is None else scale
    missing = -head % 8
    tensors = [pad(tensor, (0, missing)) if missing else tensor for tensor in (call.query, call.key, call.value)]
    result: Tensor = _aten._scaled_dot_product_flash_attention(*tensors, call.dropout, call.causal, False, scale=scale)[
        0
    ]
    return result[..., :head] if missing else result


def _efficient(call: Attention, scale: float | None) -> Tensor:
    mask = _additive(call.mask, call.query)
    if mask is not None:
        mask = _aligned(mask).expand(*call.query.shape[:3], call.key.shape[2])
    result: Tensor = _aten._scaled_dot_product_efficient_attention(
        call.query, call.key, call.value, mask, call.trains, call.dropout, call.causal, scale=scale
    )[0]
    return result


def _aligned(mask: Tensor) -> Tensor:
    """Rows of a mask that start at multiples of eight elements."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    keys = mask.shape[-1]
    return pad(mask, (0, 8 - keys % 8))[..., :keys]


def _cudnn(call: Attention, scale: float | None) -> Tensor:
    mask = call.mask
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask.logical_not(), -65504.0, torch.zeros((), dtype=call.query.dtype, device=mask.device))
    result: Tensor = _aten._scaled_dot_product_cudnn_attention(
        call.query, call.key, call.value, mask, call.trains, call.dropout, call.causal, False, scale=scale
    )[0]
    return result


def _additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    hidden = torch.full((), -math.inf, dtype=like.dtype, device=mask.device)
    return torch.where(mask, 0.0, hidden)


def _math(call: Attention, scale: float | None) -> Tensor:
    """The composite of plain operations, which adds the mask in place as it does on ordinary tensors."""
    kind = call.query.dtype
    wide = kind in _HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    query, key, value = (tensor.float() if wide else tensor for tensor in (call.query, call.key, call.value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    root = math.sqrt(abs(scale))
    query = query * (root if scale >= 0 else -root)
    mask = call.mask
    if call.causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    mask = _additive(mask, query)
    if call.grouped and query.shape[-3] != key.shape[-3]:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = torch.matmul(query, key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    weights = _aten._safe_softmax(scores, -1)
    del scores
    if call.dropout > 0:
        weights = torch.dropout(weights, call.dropout, True)
    return torch.matmul(weights, value).to(kind)


_BY: dict[str, Callable[[Attention, float | None], Tensor]] = {
    "flash": _flash,
    "efficient": _efficient,
    "cudnn": _cudnn,
    "math": _math,
}
