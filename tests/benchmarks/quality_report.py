"""What a comparison of splits shows, and the limits that it has to keep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

PEAK, BATCH = 1.1, 1.3
"""By how much accelerate's peaks lie above ours, and our largest batches above accelerate's, in the geometric mean."""
CLOSE = 0.02
"""Share of the best step time within which the policy "auto" prefers the smaller use."""
PRECISION = 1e-9
"""Share by which sums of floating point numbers differ with their order."""
RIVAL = "accelerate"


@dataclass(frozen=True)
class Terms:
    """On what a split is judged.

    Attributes:
        devices: how many.
        gib: GiB of each.
        batch: samples.
        micro_batches: parts that the batch is run in.
        schedule: their order.
    """

    devices: int
    gib: int
    batch: int
    micro_batches: int = 1
    schedule: str = "naive"

    @property
    def capacities(self) -> list[int]:
        """Bytes of every device."""
        return [self.gib * 2**30] * self.devices

    def at(self, batch: int) -> Terms:
        """The same with another batch."""
        return replace(self, batch=batch)

    def in_flight(self) -> Terms:
        """The same under 1F1B, in four micro-batches for each device, or as many as there are samples."""
        parts = min(self.batch, 4 * self.devices)
        return replace(self, micro_batches=parts, schedule="1f1b") if parts > 1 else self

    def __str__(self) -> str:
        parts = f" in {self.micro_batches}, {self.schedule}" if self.micro_batches > 1 else ""
        return f"{self.devices} x {self.gib} GiB, {self.batch}{parts}"


@dataclass(frozen=True)
class Judged:
    """A split at a batch.

    Attributes:
        assignment: device per block.
        use: largest peak / capacity.
        seconds: of a step.
        moved: bytes between devices in a step of the whole batch.
        empty: devices that hold nothing.
        largest: the largest batch that the split fits as a whole; for ours, that our balanced plans fit.
        is_kept: whether it is one of the splits that our policies choose among.
    """

    assignment: tuple[int, ...]
    use: float
    seconds: float
    moved: int
    empty: int
    largest: int
    is_kept: bool

    @property
    def fits(self) -> bool:
        """Whether every device can hold its part."""
        return self.use <= 1


@dataclass(frozen=True)
class Case:
    """One question, and by tool what it answers, or in words why it does not."""

    model: str
    mode: str
    terms: Terms
    found: dict[str, Judged | str]

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.model}, {self.mode}, {self.terms}"

    @property
    def ours(self) -> Judged | None:
        """Our balanced plan, None where nothing fits."""
        return self.of("ours, balanced")

    def of(self, tool: str) -> Judged | None:
        """What a tool answers, None where it does not."""
        found = self.found[tool]
        return found if isinstance(found, Judged) else None

    def splits(self) -> Iterator[tuple[str, Judged]]:
        """All splits there are, those of our other policies too."""
        for tool, found in self.found.items():
            if isinstance(found, Judged):
                yield tool, found


def model_table(name: str, cases: Sequence[Case]) -> Table:
    """All cases of a model, a column for each tool."""
    cells = "largest use, ms of a step, GiB that move, empty devices, largest batch"
    table = Table(title=f"{name}: {cells}", title_justify="left")
    table.add_column("devices, batch")
    for tool in cases[0].found:
        table.add_column(tool, justify="right", no_wrap=True)
    for mode in dict.fromkeys(case.mode for case in cases):
        table.add_section()
        table.add_row(f"[bold]{mode}[/bold]")
        for case in cases:
            if case.mode == mode:
                cells_of = [_cell(found) for found in case.found.values()]
                table.add_row(str(case.terms), *cells_of)
    return table


def _cell(found: Judged | str) -> str:
    if isinstance(found, str):
        return f"[dim]{' '.join(found.split()[:3])}[/dim]"
    use = f"{found.use:.1%}" if found.fits else f"[red]{found.use:.1%}[/red]"
    return f"{use} {1e3 * found.seconds:.3g} {found.moved / 2**30:.2g} {found.empty} {found.largest}"


def worse(cases: Sequence[Case]) -> list[str]:
    """Where another split is better than ours on our own objective."""
    return [f"{case.name}: {told}" for case in cases for told in _worse(case)]


def _worse(case: Case) -> Iterator[str]:
    balanced, auto = case.of("ours, balanced"), case.of("ours, auto")
    for tool, other in case.splits():
        if not other.fits:
            continue
        if balanced is None or auto is None:
            yield f"{tool} fits at {other.use:.4f}, ours does not"
            continue
        if other.is_kept and other.use < balanced.use:
            yield f"balanced uses {balanced.use:.4f}, {tool} {other.use:.4f}"
        if auto.seconds > (1 + CLOSE) * other.seconds * (1 + PRECISION):
            yield f"auto takes {auto.seconds:.4g} s, {tool} {other.seconds:.4g} s"
        elif other.is_kept and other.seconds <= auto.seconds and other.use < auto.use * (1 - PRECISION):
            yield f"auto uses {auto.use:.4f}, {tool} {other.use:.4f} in no more time"


@dataclass(frozen=True)
class Ratios:
    """Of training on 4 and 8 devices, accelerate against us.

    Attributes:
        peaks: its peak over ours, where both fit.
        all_peaks: the same wherever it gives a whole split, over budget or not.
        batches: our largest batch over its, where both fit a batch of one.
        only_ours, only_theirs, neither: cases of a peak in which one fits, and in which none does.
        only_ours_at_all: questions in which it fits no batch, and we do.
    """

    peaks: list[float]
    all_peaks: list[float]
    batches: list[float]
    only_ours: int
    only_theirs: int
    neither: int
    only_ours_at_all: int


def ratios(cases: Sequence[Case]) -> Ratios:
    """Accelerate against us."""
    found = Ratios([], [], [], 0, 0, 0, 0)
    counts = dict.fromkeys(("only_ours", "only_theirs", "neither", "only_ours_at_all"), 0)
    for case in cases:
        if case.mode != "training" or case.terms.devices not in (4, 8) or case.terms.micro_batches > 1:
            continue
        ours, theirs = case.ours, case.of(RIVAL)
        they_fit = theirs is not None and theirs.fits
        if ours is None:
            counts["only_theirs" if they_fit else "neither"] += 1
            continue
        if theirs is not None:
            found.all_peaks.append(theirs.use / ours.use)
        if theirs is not None and they_fit:
            found.peaks.append(theirs.use / ours.use)
        else:
            counts["only_ours"] += 1
        if case.terms.batch == 1:
            if theirs is not None and theirs.largest:
                found.batches.append(ours.largest / theirs.largest)
            else:
                counts["only_ours_at_all"] += 1
    return Ratios(found.peaks, found.all_peaks, found.batches, **counts)


def summary(cases: Sequence[Case]) -> list[str]:
    """The limits in words."""
    lines = [f"worse than another: {line}" for line in worse(cases)] or ["never worse on our own objective"]
    found = ratios(cases)
    lines += [
        f"accelerate's peak over ours, training on 4 and 8 devices: {_mean(found.peaks):.3f} over {len(found.peaks)} "
        f"cases in which both fit (limit {PEAK}), {_mean(found.all_peaks):.3f} over {len(found.all_peaks)} in which it "
        f"splits at all; only ours fits in {found.only_ours}, only its in {found.only_theirs}, none in {found.neither}",
        f"our largest batch over accelerate's: {_mean(found.batches):.3f} over {len(found.batches)} questions (limit "
        f"{BATCH}); only ours fits a batch of one in {found.only_ours_at_all}",
    ]
    return lines


def bars_kept(cases: Sequence[Case]) -> bool:
    """Whether ours is never worse, and ahead of accelerate by the limits."""
    found = ratios(cases)
    ahead = _mean(found.peaks) >= PEAK and _mean(found.batches) >= BATCH
    return ahead and not found.only_theirs and not worse(cases)


def _mean(values: Sequence[float]) -> float:
    """Geometric; not a number where there is none."""
    return math.exp(sum(math.log(value) for value in values) / len(values)) if values else math.nan
