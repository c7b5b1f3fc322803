"""From a trace to a profile: whose every byte is, and one row of costs for each block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from torch import nn

from autobalance.blocks import Blocks
from autobalance.devices.roofline import Rates, Work, seconds
from autobalance.profiling.holders import at_peak
from autobalance.profiling.lazy import with_shape
from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.timeline import ROOT, Timeline
from autobalance.profiling.traced import ROOT_ACCOUNT, Traced
from autobalance.profiling.walk import last_step, row_of, walk
from autobalance.profiling.work import Phase


def build_profile(
    blocks: Blocks,
    traced: Traced,
    *,
    batch: str,
    training: bool,
    precision: str,
    target: str,
    rates: Callable[[str], Rates],
    notes: Sequence[str],
) -> Profile:
    """Turn a trace with every block apart into a profile in call order.

    Args:
        blocks: the traced blocks.
        traced: the trace.
        batch: what it covers, in words.
        training: whether it trained.
        precision: as Lightning names it.
        target: whose kernels were counted.
        rates: how fast it works, by the class of a block.
        notes: what a reader should know.

    Returns:
        The profile.

    Raises:
        ValueError: if a block changes the batch itself in place.
    """
    order = call_order(traced.order, len(blocks.names))
    position = {block: index for index, block in enumerate(order)}
    owners = owners_of_accounts(traced, len(blocks.names))
    owner_of = {account: ROOT if owner == ROOT else position[owner] for account, owner in owners.items()}
    timeline = traced.tracer.timeline(owner_of)
    names = [blocks.names[block] for block in order]
    rows = _rows(timeline, traced, owner_of, names, blocks, order, rates)
    holders, parts = at_peak(
        timeline, [(row.name, row.kind) for row in rows], traced.tracer.kinds, traced.tracer.makers
    )
    together = [tuple(sorted(position[block] for block in tie)) for tie in blocks.ties]
    together += _kept_together(blocks, traced, owners, position)
    return Profile(
        blocks=rows,
        timeline=timeline,
        together=_merge(together),
        loose=tuple((name, owner_of[account]) for name, account in traced.loose.items()),
        batch=batch,
        target=target,
        training=training,
        precision=precision,
        optimizers=traced.optimizers,
        notes=tuple(notes),
        granule=traced.tracer.granule,
        holders=holders,
        parts=parts,
        waits=tuple(sorted(ROOT if block is None else position[block] for block in traced.waits.blocks)),
    )


def call_order(called: Sequence[int], count: int) -> list[int]:
    """Block indices in the order of their first call; one that is never called stays behind its declared predecessor.

    Args:
        called: indices in the order of first calls.
        count: how many blocks there are.
    """
    order = list(called)
    for block in range(count):
        if block not in order:
            order.insert(order.index(block - 1) + 1 if block else 0, block)
    return order


def owners_of_accounts(traced: Traced, count: int) -> dict[int, int]:
    """Owner by account: a loose tensor belongs to the first block that it exchanges a tensor with, else to the root.

    Args:
        traced: a trace with every block apart.
        count: how many blocks there are.

    Returns:
        Block index (as declared) or ROOT, by account.
    """
    owners = {block: block for block in range(count)} | {ROOT_ACCOUNT: ROOT}
    exchanges = list(traced.locator.exchanges) if traced.locator is not None else []
    loose = set(traced.loose.values())
    # Loose tensors that meet in one operation are one: repeat until nothing more is known, blocks before the root.
    for stronger in (True, False):
        changed = True
        while changed:
            changed = False
            for pair in exchanges:
                for account, other in (pair, pair[::-1]):
                    if account in loose and account not in owners and other in owners:
                        if stronger and owners[other] == ROOT:
                            continue
                        owners[account] = owners[other]
                        changed = True
    for account in loose:
        owners.setdefault(account, ROOT)
    return owners


def _kept_together(
    blocks: Blocks, traced: Traced, owners: Mapping[int, int], position: Mapping[int, int]
) -> list[tuple[int, ...]]:
    groups = []
    for account, block in sorted(traced.locator.changed) if traced.locator is not None else ():
        owner = owners[account]
        if owner == ROOT:
            raise ValueError(
                f"block {blocks.names[block]!r} changes the batch (or another tensor that no block made) in place, so "
                f"that on another device the change would be lost. Clone the tensor before the change, or return the "
                f"changed tensor."
            )
        groups.append((position[owner], position[block]))
    groups += [(position[owner], position[user]) for user, owner in sorted(traced.foreign)]
    return [tuple(sorted(group)) for group in groups if group[0] != group[1]]


def _merge(groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Groups that share a member, as one."""
    merged: list[set[int]] = []
    for group in groups:
        joined = set(group)
        apart = [other for other in merged if not other & joined]
        for other in merged:
            if other & joined:
                joined |= other
        merged = [*apart, joined]
    return tuple(sorted(tuple(sorted(group)) for group in merged if len(group) > 1))


def _rows(
    timeline: Timeline,
    traced: Traced,
    owner_of: Mapping[int, int],
    names: Sequence[str],
    blocks: Blocks,
    order: Sequence[int],
    rates: Callable[[str], Rates],
) -> tuple[BlockCost, ...]:
    count = len(names)
    forward, backward, stop = last_step(timeline)
    ahead, back = walk(timeline, count, forward, backward), walk(timeline, count, backward, stop)
    kinds = traced.tracer.kinds
    kinds_of_blocks = ["+".join(type(module).__name__ for module in blocks.modules[block]) for block in order]
    saved, inputs = [0] * count, [0] * count
    static = {kind: [0] * count for kind in ("weights", "gradients", "optimizer", "buffers")}
    for storage in ahead.after - ahead.before:
        row = row_of(timeline.owners[storage], count)
        if row is not None and kinds[storage] not in (*static, "workspace"):
            saved[row] += timeline.sizes[storage]
    for storage in ahead.born:
        owner = timeline.owners[storage]
        if owner >= 0 and storage in traced.tracer.copies:
            inputs[owner] += timeline.sizes[storage]
    for storage in walk(timeline, count, stop, len(timeline.events)).before | back.after:
        row = row_of(timeline.owners[storage], count)
        if row is not None and kinds[storage] in static:
            static[kinds[storage]][row] += timeline.sizes[storage]
    steps = max(1, sum(name.endswith(" forward") for name, _ in timeline.marks))
    forward_work = _work_of_a_step(traced, "forward", owner_of, count, steps)
    backward_work = _work_of_a_step(traced, "backward", owner_of, count, steps)
    # An operation on the tensors of all blocks at once is charged to one of them: share it out by what is updated.
    stepping = seconds(chain(*_work_of_a_step(traced, "optimizer", owner_of, count, steps)), rates(""))
    updated = max(1, sum(static["gradients"]))
    return tuple(
        BlockCost(
            name=names[k],
            kind=kinds_of_blocks[k],
            weights=static["weights"][k],
            gradients=static["gradients"][k],
            optimizer=static["optimizer"][k],
            buffers=static["buffers"][k],
            inputs=inputs[k],
            outputs=traced.outputs.get(order[k], 0),
            saved=saved[k],
            forward_transient=ahead.peak[k] - max(ahead.first[k], ahead.last[k]),
            backward_transient=back.peak[k] - max(back.first[k], back.last[k]),
            forward_time=seconds(forward_work[k], rates(kinds_of_blocks[k])),
            backward_time=seconds(backward_work[k], rates(kinds_of_blocks[k])),
            optimizer_time=stepping * static["gradients"][k] / updated,
            forward_work=forward_work[k],
            backward_work=backward_work[k],
            dtype=_dtype_of(blocks.modules[order[k]]),
        )
        for k in range(count)
    )


def _work_of_a_step(
    traced: Traced, phase: Phase, owner_of: Mapping[int, int], count: int, steps: int
) -> list[tuple[Work, ...]]:
    """What each row does in one step."""
    rows: list[list[Work]] = [[] for _ in range(count)]
    for account, owner in owner_of.items():
        row = row_of(owner, count)
        if row is not None:
            rows[row] += traced.work.work(phase, account)
    return [
        tuple(Work(part.arithmetic, part.flops // steps, part.traffic // steps, part.launches // steps) for part in row)
        for row in rows
    ]


def _dtype_of(modules: Sequence[nn.Module]) -> str:
    """Data type of most of the parameters."""
    numbers: Counter[str] = Counter()
    for module in modules:
        for parameter in module.parameters():
            numbers[str(parameter.dtype).removeprefix("torch.")] += with_shape(parameter).numel()
    return numbers.most_common(1)[0][0] if numbers else ""
