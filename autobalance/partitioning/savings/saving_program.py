"""The fastest way for a stage to save memory as a mixed-integer program, for stages of many blocks that offload.

Two scarce things, memory and the host link, leave the search from block to block with many ways that are nearly as good
as one another; HiGHS, through `scipy.optimize.milp`, is quicker there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.savings.saving_options import Option

_GAP = 1e-6
_SECONDS = 2.0
# Solvers hold rows to 1e-6: what seems to fit may be above by that share of the room.
_TOLERANCE = 2e-6


def has_solver() -> bool:
    """Whether SciPy is installed.

    Example:
        >>> has_solver()
    """
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        return False
    return True


def solve_program(
    options: Sequence[Sequence[Option]],
    in_flight: int,
    room: float,
    seconds: float,
    pinned: float,
    *,
    tight: bool = False,
) -> tuple[list[Option] | None, float]:
    """The fastest way, as far as floating point numbers tell whether it fits.

    Example:
        >>> chosen, bound = solve_program(options, in_flight=4, room=2**33, seconds=0.3, pinned=float("inf"))

    Args:
        options: of every block.
        in_flight: micro-batches.
        room: bytes beside what stays.
        seconds: of the stage where all blocks keep what they save.
        pinned: bytes of host memory that it may take.
        tight: leave so much room that no rounding can hide that a way does not fit.

    Returns:
        The option of each block, None where none was found in time; seconds below which no way is.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    flat = [option for each in options for option in each]
    owners = np.repeat(np.arange(len(options)), [len(each) for each in options])
    rows, least, most = _rows(options, flat, owners, in_flight, room, seconds, pinned)
    if tight:
        most[np.isclose(most, 1.0) & ~np.isclose(least, 1.0)] -= _TOLERANCE
    objective = np.zeros(rows.shape[1])
    objective[-2] = 1.0
    found = milp(
        objective,
        constraints=LinearConstraint(rows, least, most),
        integrality=np.concatenate([np.ones(len(flat)), [0, 0]]),
        bounds=Bounds(0, np.concatenate([np.ones(len(flat)), [np.inf, np.inf]])),
        options={"mip_rel_gap": _GAP, "time_limit": _SECONDS},
    )
    bound = max(seconds, float(found.mip_dual_bound)) if found.mip_dual_bound is not None else seconds
    if found.x is None:
        return None, bound
    taken = found.x[:-2] > 0.5
    chosen = [option for option, is_taken in zip(flat, taken, strict=True) if is_taken]
    return (chosen if len(chosen) == len(options) else None), bound


def _rows(
    options: Sequence[Sequence[Option]],
    flat: Sequence[Option],
    owners: NDArray[np.int64],
    in_flight: int,
    room: float,
    seconds: float,
    pinned: float,
) -> tuple[Any, NDArray[np.float64], NDArray[np.float64]]:
    """Rows over one column for each option, the time of the stage, and the share of the room that streaming stages."""
    scale = max(1.0, abs(room))
    rests, runs, leaves, staged = (
        np.array([getattr(option, name) for option in flat]) / scale for name in ("rests", "runs", "leaves", "staged")
    )
    rows: list[NDArray[np.float64]] = []
    least: list[float] = []
    most: list[float] = []

    def row(columns: NDArray[np.float64], time: float, staging: float, low: float, high: float) -> None:
        rows.append(np.concatenate([columns, [time, staging]]))
        least.append(low)
        most.append(high)

    for block in range(len(options)):
        row((owners == block) * 1.0, 0, 0, 1, 1)
    row(np.array([option.seconds for option in flat]), -1, 0, -np.inf, -seconds)
    row(np.array([option.copying for option in flat]), -1, 0, -np.inf, 0)
    if np.isfinite(pinned):
        row(np.array([option.pinned for option in flat]) / max(1.0, pinned), 0, 0, -np.inf, 1 if pinned >= 1 else 0)
    for block in range(len(options)):
        inside = (in_flight - 1) * rests + np.where(owners < block, rests, 0) + np.where(owners == block, runs, 0)
        row(inside - leaves, 0, 1, -np.inf, room / scale)
    streams = [block for block, each in enumerate(options) if any(option.streams for option in each)]
    streaming = np.array([option.streams for option in flat], dtype=np.float64)
    for block in streams:
        row(np.where(owners == block, staged, 0), 0, -1, -np.inf, 0)
    for one, other in combinations(streams, 2):
        pair = np.where((owners == one) | (owners == other), staged, 0)
        # Neighbours are those between which no block streams.
        between = (owners > one) & (owners < other)
        row(pair - between * streaming * staged.max() * 2, 0, -1, -np.inf, 0)
    return np.array(rows), np.array(least), np.array(most)
