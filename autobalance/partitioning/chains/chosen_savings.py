"""What the stages of a way do to hold less memory, block by block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autobalance.partitioning.chains.kinds import Kind
from autobalance.partitioning.chains.known_stages import KnownStages
from autobalance.partitioning.chains.sweep import Path
from autobalance.partitioning.savings.choice import Choice


@dataclass
class ChosenSavings(KnownStages):
    """A chain on devices, with what was chosen for stages that would not fit by themselves.

    Example:
        >>> saving, streamed = problem.savings(cut.path, kinds)
    """

    def choices(self, path: Path, kinds: tuple[Kind, ...]) -> list[Choice | None]:
        """What each stage does to fit; None where it keeps all.

        Args:
            path, kinds: as for `savings`.
        """
        found: list[Choice | None] = []
        for number, (at, start, stop) in enumerate(path):
            stage = self.in_flight(len(path) - number), start, stop
            saver = self.savers.get(kinds[at]) if self.allowed is not None else None
            found.append(saver.choices.get(stage) if saver is not None else None)
        return found

    def savings(self, path: Path, kinds: tuple[Kind, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """What becomes of the saved tensors of each block, and the blocks whose weights stream.

        Args:
            path: the stages.
            kinds: of devices, as the path counts them.

        Returns:
            "keep", "recompute" or "offload" for each block, or nothing where all keep; indices of blocks that stream.
        """
        saving, streamed = ["keep"] * len(self.profile.blocks), list[int]()
        for (_, start, stop), choice in zip(path, self.choices(path, kinds), strict=True):
            if choice is None:
                continue
            for unit, word in zip(range(start, stop), choice.saving, strict=True):
                for owner in self.chain.units[unit]:
                    if owner >= 0 and word != "keep" and self._may(word, owner):
                        saving[owner] = word
            streamed += [owner for unit in choice.streamed for owner in self.chain.units[unit] if owner >= 0]
        return (tuple(saving) if any(word != "keep" for word in saving) else ()), tuple(streamed)

    @cached_property
    def is_coarse(self) -> bool:
        """Whether blocks might save memory one by one that here do so together, as a unit, or not at all, in items."""
        allowed = self.allowed
        if allowed is None:
            return False
        units = [[owner for owner in owners if owner >= 0] for owners in self.chain.units]
        items = [[owner for owner in item.owners if owner >= 0] for item in self.chain.items]
        return any(
            (allowed.recompute and self._may("recompute", owner))
            or (allowed.offload and (self._may("offload", owner) or self.profile.blocks[owner].static > 0))
            for owners in [*(unit for unit in units if len(unit) > 1), *items]
            for owner in owners
        )

    def _may(self, word: str, owner: int) -> bool:
        block = self.profile.blocks[owner]
        return block.saved > (block.inputs if word == "recompute" else 0)
