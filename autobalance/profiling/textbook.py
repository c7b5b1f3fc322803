"""A profile by hand: rows and timeline of a model whose blocks cost what somebody says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autobalance.profiling.block_cost import BlockCost
from autobalance.profiling.timeline import Timeline
from autobalance.timelines.calls import Call

COLUMNS = ("static", "saved", "transient", "forward_time", "backward_time", "transfer")
"""What is said of every block: bytes, seconds, bytes."""


def textbook(
    columns: Mapping[str, Sequence[float] | None], names: Sequence[str] | None = None, batch_size: int = 0
) -> tuple[tuple[BlockCost, ...], Timeline]:
    """Rows and timeline of the textbook's step: static bytes, then forward of each block, then backward in reverse.

    Example:
        >>> rows, timeline = textbook({"static": [4, 4], "saved": [2, 1]})

    Args:
        columns: as the arguments of `Profile.from_costs`; `static` is needed.
        names: of the blocks; None: `block0`, `block1`, ...
        batch_size: samples that the costs are for; 0: not known.

    Raises:
        ValueError: lists of different lengths, or a number that is negative or not finite.
    """
    static, transfer = columns["static"], columns.get("transfer")
    assert static is not None
    count = len(static)
    if transfer is not None and len(transfer) == count - 1:
        transfer = [*transfer, 0]
    given = {**columns, "transfer": transfer}
    column = {what: _column(what, given.get(what), count) for what in COLUMNS}
    if names is not None and len(names) != count:
        raise ValueError(f"names has {len(names)} entries, static has {count}; they describe the same blocks")
    sizes = {what: [_whole(size) for size in column[what]] for what in ("static", "saved", "transient", "transfer")}
    blocks = tuple(
        BlockCost(
            names[k] if names is not None else f"block{k}",
            weights=sizes["static"][k],
            inputs=sizes["transfer"][k - 1] if k else 0,
            outputs=sizes["transfer"][k],
            saved=sizes["saved"][k],
            forward_transient=sizes["transient"][k],
            backward_transient=sizes["transient"][k],
            forward_time=float(column["forward_time"][k]),
            backward_time=float(column["backward_time"][k]),
        )
        for k in range(count)
    )
    inputs = [block.inputs for block in blocks]
    timeline = _textbook_timeline(sizes["static"], sizes["saved"], sizes["transient"], inputs)
    return blocks, _per_sample(timeline, count, batch_size) if batch_size else timeline


def _column(what: str, given: Sequence[float] | None, count: int) -> Sequence[float]:
    if given is None:
        return [0] * count
    if len(given) != count:
        raise ValueError(f"{what} has {len(given)} entries, static has {count}; they describe the same blocks")
    wrong = [number for number in given if not 0 <= number < math.inf]
    if wrong:
        raise ValueError(f"{what} has the entry {wrong[0]}; costs are finite and not negative")
    return given


def _per_sample(timeline: Timeline, static: int, batch_size: int) -> Timeline:
    """Static storages come first and do not depend on the batch; whole bytes of all others are for each sample."""
    fixed = (*timeline.sizes[:static], *[0] * (len(timeline.sizes) - static))
    each = (*[0] * static, *(-(-size // batch_size) for size in timeline.sizes[static:]))
    return replace(timeline, fixed=fixed, per_sample=each)


def _whole(size: float) -> int:
    return -int(-size // 1)


def _textbook_timeline(
    static: Sequence[int], saved: Sequence[int], transient: Sequence[int], inputs: Sequence[int]
) -> Timeline:
    count = len(static)
    # Storages: static, saved and transient of every block, then the part of what it saves that are its inputs, which is
    # there by itself only where the block is recomputed.
    births = [k + 1 for k in range(count)]
    forward: list[int] = []
    backward: list[int] = []
    calls: list[Call] = []
    for k in range(count):
        keep, work = count + k + 1, 2 * count + k + 1
        forward += [work, -work, keep]
        start, stop, back = count + 3 * k, count + 3 * (k + 1), count + 3 * (2 * count - 1 - k)
        calls.append(Call(k, start, stop, back, saved=(count + k,), until=(stop,), kept=(3 * count + k,)))
    for k in reversed(range(count)):
        keep, work = count + k + 1, 2 * count + k + 1
        backward += [work, -work, -keep]
    return Timeline(
        sizes=(*static, *saved, *transient, *inputs),
        owners=tuple(range(count)) * 4,
        values=(-1,) * (4 * count),
        events=(*births, *forward, *backward),
        marks=(("step 1 forward", count), ("step 1 backward", count + len(forward))),
        calls=tuple(calls),
    )
