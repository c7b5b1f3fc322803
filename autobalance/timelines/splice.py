"""The profile of a deeper model from that of a shallow one: a block in the middle of equal ones is repeated as data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from autobalance.profiling.profile import BlockCost, Profile
from autobalance.timelines.deepening import Deepening


def repeated(profile: Profile, block: str, times: int) -> Profile:
    """The profile of the same model with more of one of its equal blocks.

    Blocks before and after it must equal it, as in a stack of layers, and be connected to their neighbours only; the
    one before may own something that all share, such as a mask. Peaks are then those of a trace of the deep model, for
    any assignment.

    Example:
        >>> deep = repeated(profile, "layers.1", 29)     # 32 layers from 3

    Args:
        profile: of at least three equal blocks in a row.
        block: name of one that is neither the first nor the last of them.
        times: how many more of it there are to be.

    Returns:
        A profile whose blocks are numbered on.

    Raises:
        ValueError: there is no such block, or its neighbours differ from it or are connected otherwise.
    """
    if block not in profile.names:
        raise ValueError(f"the profile has no block {block!r}; it has {', '.join(profile.names)}")
    if times < 0:
        raise ValueError(f"times={times}; a block can be repeated 0 times or more")
    index = profile.names.index(block)
    if not 0 < index < len(profile.blocks) - 1:
        raise ValueError(f"{block!r} has no block before or after it; three equal blocks in a row are needed")
    tied = next((group for group in profile.together if index in group), None)
    if tied is not None:
        shared = ", ".join(profile.names[member] for member in tied)
        raise ValueError(f"{block!r} must share a device ({shared}), so more of it would not be independent blocks")
    if not times:
        return profile
    try:
        timeline = Deepening(profile.timeline, index, times).timeline()
    except ValueError as error:
        raise ValueError(f"{block!r} cannot be repeated: {error}") from error

    def moved(owner: int) -> int:
        return owner + times if owner > index else owner

    names = _Names(block, profile.names[index + 1], times)
    return replace(
        profile,
        blocks=_rows(profile.blocks, index, times, names),
        other_blocks=_rows(profile.other_blocks, index, times, names) if profile.other_blocks else (),
        timeline=timeline,
        together=tuple(tuple(moved(member) for member in group) for group in profile.together),
        loose=tuple((names.later(name), moved(owner)) for name, owner in profile.loose),
        notes=(*profile.notes, f"{times} more of {block} were not traced: they are taken to be like it"),
    )


def _rows(blocks: Sequence[BlockCost], index: int, times: int, names: _Names) -> tuple[BlockCost, ...]:
    copies = (replace(blocks[index], name=names.copy(number)) for number in range(1, times + 1))
    later = (replace(block, name=names.later(block.name)) for block in blocks[index + 1 :])
    return (*blocks[: index + 1], *copies, *later)


class _Names:
    """Numbers blocks on: `layers.2` becomes `layers.31` where 29 copies of `layers.1` come before it."""

    def __init__(self, name: str, following: str, times: int) -> None:
        self._name, self._times = name, times
        words, others = re.split(r"(\d+)", name), re.split(r"(\d+)", following)
        differ = [at for at, pair in enumerate(zip(words, others, strict=False)) if pair[0] != pair[1]]
        counted = len(words) == len(others) and all(
            words[at].isdecimal() and others[at].isdecimal() and int(others[at]) == int(words[at]) + 1 for at in differ
        )
        self._words, self._numbers = words, differ if counted else []

    def copy(self, number: int) -> str:
        """Name of a copy, counted from 1."""
        return self._raised(self._words, number) if self._numbers else f"{self._name} ({number} more)"

    def later(self, name: str) -> str:
        """New name of a block or tensor, which changes if it is, or is inside, a later block of the same row."""
        words = re.split(r"(\d+)", name)
        fits = self._numbers and all(
            at < len(words) and words[at].isdecimal() and int(words[at]) > int(self._words[at])
            if at in self._numbers
            else words[at : at + 1] == [word] or (word == "" and at == len(self._words) - 1)
            for at, word in enumerate(self._words)
        )
        return self._raised(words, self._times) if fits else name

    def _raised(self, words: Sequence[str], by: int) -> str:
        return "".join(str(int(word) + by) if at in self._numbers else word for at, word in enumerate(words))
