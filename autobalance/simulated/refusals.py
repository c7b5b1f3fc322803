"""Operations that simulated devices refuse in words, where torch would fail without any."""

from __future__ import annotations

from typing import Any

import torch

from autobalance.simulated.dispatch import Call, carry_out

_aten = torch.ops.aten
_WEIGHT, _SPARSE = 0, 4


def register() -> None:
    """Let the operators of this module be checked first."""
    carry_out(_aten.embedding.default, _embedding)


def _embedding(func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) > _SPARSE and args[_SPARSE] and args[_WEIGHT].requires_grad and torch.is_grad_enabled():
        raise RuntimeError("sparse gradients are not simulated; build the embedding with sparse=False")
    return Call(func, args, kwargs).run(func)
