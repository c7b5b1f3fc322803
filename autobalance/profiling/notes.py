"""What a reader of a profile should know of its trace, in words."""

from __future__ import annotations

from collections.abc import Sequence

from autobalance.profiling.traced import Traced


def notes_of(traced: Traced, training: bool) -> list[str]:
    """Sentences about a trace.

    Args:
        traced: the trace.
        training: whether it trained.
    """
    told = []
    if traced.shared:
        told.append("not copied for the trial, but shared with it: " + ", ".join(sorted(set(traced.shared))))
    if traced.quantized:
        told.append(
            f"{traced.quantized} layer(s) of bitsandbytes are counted at the size of their quantised weights, which "
            f"the device then holds; their products are modelled, not run"
        )
    told += _placeholders_in_words(traced.placeholders)
    if training and traced.untrained:
        told.append(_without_gradient(list(traced.untrained)))
    steps = sum(name.startswith("step ") and name.endswith(" forward") for name, _ in traced.tracer.marks)
    waits = traced.waits.in_words(max(1, steps))
    return [*told, waits] if waits else told


def _placeholders_in_words(kinds: Sequence[str]) -> list[str]:
    """What was taken for numbers that only real data know."""
    numbers, choices = kinds.count("float"), kinds.count("choice")
    told = []
    if numbers:
        told.append(
            f"{numbers} number(s) that only real data know (such as `loss.item()`) were taken as 1.0 in the trial"
        )
    if choices:
        told.append(
            f"{choices} choice(s) that only real data know (a token that is sampled, the expert a token goes to) were "
            f"taken as if everything were chosen equally often"
        )
    return told


def _without_gradient(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"{len(names)} trainable parameter(s) got no gradient in the trial ({shown}): their gradients and optimizer "
        f"state are counted as if they had, since another batch may train them"
    )
