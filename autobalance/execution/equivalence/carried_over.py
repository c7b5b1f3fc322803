"""Whether a step carries anything from batch to batch in the module: tried on two batches before they first overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from autobalance.compat import is_batch_norm
from autobalance.execution.equivalence.constant_random import constant_random
from autobalance.execution.equivalence.equivalence import batch_norms_at_rest
from autobalance.execution.equivalence.module_state import ModuleState, first_difference
from autobalance.execution.equivalence.writes_kept import WritesKept
from autobalance.profiling.sandbox import random_state_kept


def carried_over(
    step: Callable[[Any], object],
    batches: Sequence[Any],
    module: nn.Module,
    skip: Callable[[nn.Module], bool] = lambda module: False,
) -> str | None:
    """The attribute or buffer that a step changes from one batch to the next.

    What only the first step makes, such as a mask that is kept, is not one; nor are statistics of batch norms, which
    see batches in their order however these overlap. Afterwards everything is as it was.

    Example:
        >>> carried_over(lambda batch: module.training_step(batch, 0), [first, second], module)   # doctest: +SKIP
        'losses'

    Args:
        step: runs the user's step, and keeps nothing of it.
        batches: two of them, with different numbers.
        module: the model, placed.
        skip: modules whose state follows rules of its own, such as metrics.

    Returns:
        Its qualified name; None if there is none.
    """

    def is_skipped(part: nn.Module) -> bool:
        return skip(part) or is_batch_norm(part)

    first, second = batches
    begin = ModuleState(module, is_skipped, beside=batches)
    kept = WritesKept(begin.tensors)
    with random_state_kept(), batch_norms_at_rest(module):
        try:
            with kept, constant_random():
                step(first)
            between = ModuleState(module, is_skipped, beside=batches)
            written = WritesKept(between.tensors)
            before = between.reading(written.has_changed)
            with kept, written, constant_random():
                step(second)
            return first_difference(before, between.reading(written.has_changed), tolerance=0.0)
        finally:
            begin.put_back()
            kept.put_back()
