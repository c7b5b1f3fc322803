"""What holds the most memory at the peak, to be told in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autobalance.profiling.timeline import HOST, Timeline


@dataclass(frozen=True)
class Holder:
    """Storages of one kind, in blocks of one class, that are alive at the peak.

    Example:
        >>> Holder(blocks=("head",), what="addmm 8x50257", nbytes=1_608_224, share=0.38)

    Attributes:
        blocks: names of the blocks; none for what is on the root device.
        what: "weights", "gradients", "optimizer", "buffers", or the operation that made it and its shape.
        nbytes: bytes together.
        share: of the peak.
    """

    blocks: tuple[str, ...]
    what: str
    nbytes: int
    share: float


@dataclass(frozen=True)
class Parts:
    """How certain the bytes of the peak are.

    Example:
        >>> Parts(exact=2**30, modelled=2**24, allowance=2**26)

    Attributes:
        exact: tensors, which the trace has seen.
        modelled: what kernels and libraries take by the formulas in their sources.
        allowance: what cannot be derived and was measured elsewhere, such as workspaces of convolutions.
    """

    exact: int = 0
    modelled: int = 0
    allowance: int = 0


def at_peak(
    timeline: Timeline,
    rows: Sequence[tuple[str, str]],
    kinds: Sequence[str],
    makers: Sequence[str],
    most: int = 12,
) -> tuple[tuple[Holder, ...], Parts]:
    """The largest holders at the instant at which all blocks together hold the most, and how certain they are.

    Args:
        timeline: the trace.
        rows: name and class of every block.
        kinds: of the storages: "weights", "gradients", "scratch", "allowance", ..., or "".
        makers: the operation that made each storage, with its shape.
        most: how many.

    Returns:
        The holders, the largest first; and the parts.
    """
    alive, total = _alive_at_peak(timeline)
    held: dict[tuple[str, str], int] = defaultdict(int)
    names: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    certain: dict[str, int] = defaultdict(int)
    for storage in alive:
        size = timeline.sizes[storage]
        owner = timeline.owners[storage]
        name, kind = rows[owner] if owner >= 0 else ("", "")
        key = kind, _what(kinds[storage], makers[storage])
        held[key] += size
        names[key] |= {name: None} if name else {}
        certain[_certainty(kinds[storage])] += size
    largest = sorted(held.items(), key=lambda item: -item[1])[:most]
    order = {name: position for position, (name, _) in enumerate(rows)}
    holders = tuple(
        Holder(tuple(sorted(names[key], key=order.__getitem__)), key[1], nbytes, nbytes / total)
        for key, nbytes in largest
    )
    return holders, Parts(**certain)


def _certainty(kind: str) -> str:
    return "allowance" if kind == "allowance" else "modelled" if kind in ("scratch", "workspace") else "exact"


def _what(kind: str, maker: str) -> str:
    if kind in ("weights", "gradients", "optimizer", "buffers"):
        return kind
    return f"{kind} of {maker}" if kind and kind not in maker else maker or "other tensors"


def _alive_at_peak(timeline: Timeline) -> tuple[list[int], int]:
    """Storages alive at the highest instant on a single device, of each value the first; and their bytes."""
    used = highest = where = 0
    holding: dict[int, list[int]] = defaultdict(list)

    def change(storage: int, born: bool) -> int:
        if timeline.owners[storage] == HOST:
            return 0
        value = timeline.values[storage]
        if value < 0:
            return timeline.sizes[storage] if born else -timeline.sizes[storage]
        others = holding[value]
        before = timeline.sizes[others[0]] if others else 0
        (others.append if born else others.remove)(storage)
        return (timeline.sizes[others[0]] if others else 0) - before

    for position, event in enumerate(timeline.events):
        used += change(abs(event) - 1, event > 0)
        if used > highest:
            highest, where = used, position + 1
    alive: dict[int, None] = {}
    for event in timeline.events[:where]:
        if event > 0:
            alive[event - 1] = None
        else:
            alive.pop(-event - 1, None)
    seen: set[int] = set()
    counted = []
    for storage in alive:
        value = timeline.values[storage]
        if timeline.owners[storage] != HOST and (value < 0 or value not in seen):
            counted.append(storage)
            seen.add(value)
    return counted, max(1, highest)
