"""Splits to hold a plan against: those of other tools, of rules of thumb, and of the user's own files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import autobalance
from autobalance.commands.accelerate_map import accelerate_map
from autobalance.partitioning.rivals.even_splits import even_by_layers, even_by_weights
from autobalance.profiling.profile import Profile


@dataclass(frozen=True)
class Split:
    """Where somebody would put the blocks.

    Attributes:
        name: what to call it.
        device_map: as `score` takes it, or a plan; None where there is none.
        reason: why there is none.
    """

    name: str
    device_map: Mapping[str, Any] | Sequence[int] | autobalance.Plan | None
    reason: str = ""


def other_splits(profile: Profile, budgets: Sequence[int]) -> list[Split]:
    """accelerate's split, where it is installed, and the even ones.

    Example:
        >>> [split.name for split in other_splits(profile, (80 * 2**30,) * 4)]
        ['accelerate', 'even by layers', 'even by weights']

    Args:
        profile: what the blocks cost.
        budgets: bytes that each device may hold.
    """
    return [
        _of_accelerate(profile, budgets),
        Split("even by layers", even_by_layers(profile, len(budgets))),
        Split("even by weights", even_by_weights(profile, len(budgets))),
    ]


def split_of_file(path: Path) -> Split:
    """The split in a file: a device_map as JSON, or a saved plan.

    Example:
        >>> split_of_file(Path("by_hand.json"))    # doctest: +SKIP

    Args:
        path: the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is neither.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); it is to hold a device_map or a saved plan") from error
    if not isinstance(content, dict) or content.get("kind") != "plan":
        return Split(path.name, content)
    return Split(path.name, autobalance.Plan.load(path))


def _of_accelerate(profile: Profile, budgets: Sequence[int]) -> Split:
    try:
        places = accelerate_map(profile, budgets)
    except ImportError as error:
        return Split("accelerate", None, reason=str(error))
    found = [place for place in places if isinstance(place, int)]
    if len(found) == len(places):
        return Split("accelerate", found)
    where = Counter(place for place in places if not isinstance(place, int))
    told = " and ".join(f"{count} of {len(places)} blocks on {place}" for place, count in where.items())
    return Split("accelerate", None, reason=f"it leaves {told}")
