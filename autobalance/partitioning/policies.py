"""What a good plan is, policy by policy. Each is exact: it returns the best partition of a chain in its own sense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from autobalance.partitioning.minmax import Cuts, Key, Uses, fairest, least_largest

Policy = Callable[[Sequence[Uses], Sequence[bool], float], "tuple[Key, Cuts] | None"]
"""From the uses and what is held beside the chain to what is minimised (smaller is better) and the cuts.

The last argument is the largest first entry of what is minimised that is still of interest: it spares work. None: there
is no partition, or none of interest.
"""


def balanced(uses: Sequence[Uses], held: Sequence[bool], most: float = np.inf) -> tuple[Key, Cuts] | None:
    """The largest use as small as can be, then no device empty, then the next-largest use, and so on.

    Example:
        >>> key, cuts = balanced(uses, held=[False] * len(uses))
    """
    return fairest(uses, held, most=most)


def balanced_low_0(uses: Sequence[Uses], held: Sequence[bool], most: float = np.inf) -> tuple[Key, Cuts] | None:
    """Device 0 holds as little as the others allow; they are balanced.

    Example:
        >>> key, cuts = balanced_low_0(uses, held=[False] * len(uses))
    """
    units = uses[0].shape[0] - 1
    if len(uses) == 1:
        use = float(uses[0][0, units])
        return ((use,), (0, units)) if np.isfinite(use) else None
    first = np.where(np.isfinite(least_largest(uses[1:])[0]), uses[0][0], np.inf)
    least = float(first.min())
    if not np.isfinite(least) or least > most:
        return None
    found = []
    for stop in np.flatnonzero(first == least).tolist():
        rest = fairest(uses[1:], held[1:], start=stop)
        if rest is not None:
            found.append(((least, *rest[0]), (0, *rest[1])))
    return min(found)


def sequential(uses: Sequence[Uses], held: Sequence[bool], most: float = np.inf) -> tuple[Key, Cuts] | None:
    """Devices are filled in order, and as few as possible are used.

    Example:
        >>> key, cuts = sequential(uses, held=[False] * len(uses))
    """
    units = uses[0].shape[0] - 1
    fewest = np.full(units + 1, np.inf)
    fewest[units] = 0.0
    suffixes = [fewest]
    for use, busy in zip(reversed(uses), reversed(held), strict=True):
        cost = np.where(np.isfinite(use), 1.0, np.inf)
        if not busy:
            cost[np.diag_indices(units + 1)] -= 1.0
        suffixes.append((cost + suffixes[-1]).min(axis=1))
    suffixes.reverse()
    if not np.isfinite(suffixes[0][0]) or suffixes[0][0] > most:
        return None
    cuts = [0]
    for device, (use, busy) in enumerate(zip(uses, held, strict=True)):
        here = cuts[-1]
        cost = np.where(np.isfinite(use[here]), 1.0, np.inf)
        if not busy:
            cost[here] -= 1.0
        stops = np.flatnonzero(cost + suffixes[device + 1] == suffixes[device][here])
        cuts.append(int(stops[-1]))
    sizes = [float(stop - start) for start, stop in pairwise(cuts)]
    return (float(suffixes[0][0]), *(-size for size in sizes)), tuple(cuts)


POLICIES: dict[str, Policy] = {
    "balanced": balanced,
    "balanced_low_0": balanced_low_0,
    "sequential": sequential,
}
# "auto" becomes least step time once times are part of the search; the other name is the one transformers' users know.
_ALSO = {"auto": "balanced", "minimize_first_gpu_memory": "balanced_low_0"}


def policy_name(word: str) -> str:
    """The policy that a word stands for.

    Example:
        >>> policy_name("auto")
        'balanced'

    Raises:
        ValueError: there is no such policy.
    """
    name = _ALSO.get(word, word)
    if name not in POLICIES:
        raise ValueError(f"policy={word!r} does not exist; choose one of {', '.join([*_ALSO, *POLICIES])}")
    return name
