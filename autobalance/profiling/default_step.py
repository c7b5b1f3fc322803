"""What a step does where the user has given none: call the model, and make a loss of what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from autobalance.profiling.operands import operands_in


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model with a mapping as keywords, a tuple as positionals, anything else as the only argument.

    Args:
        model: any.
        batch: what it is called with.

    Returns:
        What the model returns.
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    is_several = isinstance(batch, tuple) and not isinstance(batch, PackedSequence)
    return model(*batch) if is_several else model(batch)


def default_step(model: nn.Module, batch: Any) -> Tensor:
    """Call the model and reduce what it returns to a loss.

    Args:
        model: called with a mapping as keywords, a tuple as positionals, anything else as the only argument.
        batch: the batch.

    Returns:
        The output's `.loss` (or `["loss"]`) if it has one, else the sum of its floating tensors.

    Raises:
        ValueError: if the output holds no floating tensor.
    """
    output = call_model(model, batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    sums = [tensor.sum() for tensor in operands_in(output) if tensor.is_floating_point()]
    if not sums:
        raise ValueError(
            f"{type(model).__name__} returned {type(output).__name__}, which holds no floating tensor to run backward "
            f"from. Pass `step=`, a function of (model, batch) that returns the loss."
        )
    total = sums[0]
    for other in sums[1:]:
        total = total + other.to(total.device)
    return total
