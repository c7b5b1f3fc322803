"""Several splits of one model side by side."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from autobalance.partitioning.score import Score
from autobalance.report.grid import add_line, grid
from autobalance.units import format_size


def score_table(scores: Mapping[str, Score]) -> Table:
    """Scores, one line for each split: the peak on every device, the largest use, whether it fits.

    Example:
        >>> rich.print(score_table({"by hand": autobalance.score(profile, device_map, "2x80GiB")}))  # doctest: +SKIP

    Args:
        scores: at least one, all on the same devices, by what to call them.
    """
    count = len(next(iter(scores.values())).peaks)
    peaks = [f"peak on {device}" for device in range(count)]
    table = grid(left=["split"], right=[*peaks, "largest use", "fits", "step"])
    for name, score in scores.items():
        add_line(
            table,
            name,
            *map(format_size, score.peaks),
            f"{max(score.uses):.1%}",
            "yes" if score.fits else "no",
            f"{score.step_time * 1e3:.3g} ms" if score.step_time else "",
        )
    return table
