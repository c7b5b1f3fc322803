"""What a choice might have been whose numbers are unknown: which expert a token goes to, in which order things are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autobalance import compat
from autobalance.simulated.elements import is_small

_aten = torch.ops.aten

# Operators that say which of the entries of their first operand along a dimension were chosen: position and name of
# the dimension among the arguments, its default, and which of the results holds the choice.
_CHOICES: dict[Any, tuple[int, int | None, int]] = {
    _aten.topk.default: (2, -1, 1),
    _aten.sort.default: (1, -1, 1),
    _aten.sort.stable: (2, -1, 1),
    _aten.argsort.default: (1, -1, 0),
    _aten.argmax.default: (1, None, 0),
    _aten.argmin.default: (1, None, 0),
    _aten.max.dim: (1, None, 1),
    _aten.min.dim: (1, None, 1),
    _aten.multinomial.default: (3, -1, 0),
}


def guess(func: Any, args: Any, kwargs: Any, result: Any) -> Sequence[Tensor | None]:
    """Balanced choices for an operation that chooses: each entry is chosen as often as any other.

    Token `t` of a mixture of `n` experts that takes `k` of them goes to experts `t*k, ..., t*k + k - 1` modulo `n`.

    Args:
        func: operator overload.
        args: its positional arguments.
        kwargs: its keyword arguments.
        result: what it returned, fakes.

    Returns:
        One for each result: indices on the CPU, or None for what is no choice; empty for any other operator.
    """
    if func not in _CHOICES:
        return ()
    position, default, which = _CHOICES[func]
    results = result if isinstance(result, (list, tuple)) else (result,)
    chosen = results[which]
    source = args[0]
    dim = args[position] if position < len(args) else kwargs.get("dim", default)
    if dim is None or not source.dim() or not is_small(chosen):
        return ()
    among = source.shape[dim]
    keeps = chosen.dim() == source.dim()
    with compat.modes_disabled():
        shape = chosen.shape if not keeps else torch.empty(chosen.shape, device="meta").movedim(dim, -1).shape
        indices = torch.arange(chosen.numel()).remainder(among).reshape(shape)
        made = (indices.movedim(-1, dim) if keeps else indices).contiguous()
    return [made if index == which else None for index in range(len(results))]
