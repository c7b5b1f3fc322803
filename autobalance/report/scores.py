"""Several splits of one model side by side."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.table import Table

from autobalance.partitioning.score import Score
from autobalance.units import format_size


def score_table(scores: Mapping[str, Score]) -> Table:
    """Scores, one line for each split: the peak on every device, the largest use, whether it fits.

    Example:
        >>> rich.print(score_table({"by hand": autobalance.score(profile, device_map, "2x80GiB")}))  # doctest: +SKIP

    Args:
        scores: at least one, all on the same devices, by what to call them.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("split", overflow="fold")
    for device in range(len(next(iter(scores.values())).peaks)):
        table.add_column(f"peak on {device}", justify="right", no_wrap=True)
    for heading in ("largest use", "fits", "step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, score in scores.items():
        table.add_row(
            name,
            *map(format_size, score.peaks),
            f"{max(score.uses):.1%}",
            "yes" if score.fits else "no",
            f"{score.step_time * 1e3:.3g} ms" if score.step_time else "",
        )
    return table
