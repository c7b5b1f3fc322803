"""Our plans beside those of accelerate, transformers and torchgpipe, for twelve models at their real size.

Run it by hand: `OMP_NUM_THREADS=1 python tests/benchmarks/plan_quality.py` (tools: `autobalance[benchmarks]`, and
`pip install --no-deps torchgpipe`). Profiles are traced once and kept in a folder (`large_profiles.py`). Every split is
judged by `autobalance.score` on the same profile: 2, 4 and 8 devices of 24 and 80 GiB, training with AdamW and
inference, at a batch of one and at the largest that our plan fits; with `--in-flight` that again in micro-batches under
1F1B, which tied weights make nearly serial, so that what is searched there is not proved. Exit status 1 where ours is
worse than another on its own objective anywhere, or ahead of accelerate by less than the limits of
`quality_report.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from batch_search import largest_of_plans, largest_of_split
from large_models import LARGE, MODES
from large_profiles import FOLDER, profile_of
from other_splits import OTHERS, NoSplit, Question, quiet
from quality_report import Case, Judged, Terms, bars_kept, model_table, summary
from rich.console import Console
from torch import nn

import autobalance
from autobalance import InfeasiblePlanError, Profile
from autobalance.partitioning.transfers import bytes_moved, crossings_of

DEVICES = (2, 4, 8)
GIB = (24, 80)
POLICIES = ("auto", "balanced")


class Judge:
    """Judges splits of one model in one mode, and remembers profiles by batch."""

    def __init__(self, name: str, mode: str, folder: Path) -> None:
        self.name, self.mode = name, mode
        self.profile = profile_of(name, mode, folder)
        self.module: nn.Module = LARGE[name].build(mode)
        self.at = lru_cache(maxsize=64)(self._at)
        self.largest = lru_cache(maxsize=64)(self._largest)
        self.crossings = lru_cache(maxsize=8)(lambda batch: crossings_of(self.at(batch)))

    def _at(self, batch: int) -> Profile:
        return self.profile if batch == self.profile.batch_size else self.profile.scaled(batch)

    def cases(self, devices: int, gib: int, is_in_flight: bool) -> Iterator[Case]:
        """A batch of one, and the largest that our balanced plan fits, as a whole and, if wanted, in micro-batches."""
        alone = Terms(devices, gib, 1)
        ours = largest_of_plans(self.at, lambda batch: self.plan("balanced", alone.at(batch)), alone.capacities)
        largest = alone.at(max(1, ours))
        for terms in dict.fromkeys((alone, largest, largest.in_flight() if is_in_flight else largest)):
            found: dict[str, Judged | str] = {}
            for policy in POLICIES:
                try:
                    plan = self.plan(policy, terms)
                    found[f"ours, {policy}"] = self.judged(plan.assignment, plan.root, terms, ours)
                except InfeasiblePlanError:
                    found[f"ours, {policy}"] = "no plan fits"
            question = Question(LARGE[self.name], self.module, self.at(terms.batch), self.at(1), devices, gib * 2**30)
            for tool, split in OTHERS.items():
                try:
                    assignment = split(question)
                except NoSplit as reason:
                    found[tool] = str(reason)
                    continue
                most = self.largest(assignment, devices, gib)
                found[tool] = self.judged(assignment, assignment[-1], terms, most)
            yield Case(self.name, self.mode, terms, found)

    def plan(self, policy: str, terms: Terms) -> autobalance.Plan:
        """Ours, on the terms that all others are judged on."""
        return autobalance.plan(
            self.at(terms.batch),
            terms.capacities,
            policy=policy,
            micro_batches=terms.micro_batches,
            schedule=terms.schedule,
            recompute=False,
            cache=False,
        )

    def judged(self, assignment: Sequence[int], root: int, terms: Terms, largest: int) -> Judged:
        """A split on these terms."""
        profile = self.at(terms.batch)
        score = autobalance.score(
            profile,
            assignment,
            terms.capacities,
            root=root,
            micro_batches=terms.micro_batches,
            schedule=terms.schedule,
        )
        moved = sum(bytes_moved(self.crossings(terms.batch), assignment, root).values())
        return Judged(
            assignment=tuple(assignment),
            use=max(score.uses),
            seconds=score.step_time,
            moved=moved,
            empty=score.peaks.count(0),
            largest=largest,
            is_kept=_keeps_the_order(assignment, profile),
        )

    def _largest(self, assignment: tuple[int, ...], devices: int, gib: int) -> int:
        return largest_of_split(self.at, assignment, assignment[-1], Terms(devices, gib, 1).capacities)


def _keeps_the_order(assignment: Sequence[int], profile: Profile) -> bool:
    """Whether a split is one of those that we choose among: consecutive blocks, groups that share a device apart."""
    beside = {block for group in profile.together if group[-1] - group[0] >= len(group) for block in group}
    visited: list[int] = []
    for block, device in enumerate(assignment):
        if block not in beside and visited[-1:] != [device]:
            visited.append(device)
    together = all(len({assignment[block] for block in group}) == 1 for group in profile.together)
    return together and len(visited) == len(set(visited))


def main() -> int:
    """Judge all cases, and say whether the limits are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(LARGE), default=list(LARGE))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES))
    parser.add_argument("--gib", nargs="+", type=int, default=list(GIB), help="of each device")
    parser.add_argument("--in-flight", action="store_true", help="also judge the largest batch in micro-batches")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the profiles (default: %(default)s)")
    options = parser.parse_args()
    quiet()
    console = Console(width=240)
    cases: list[Case] = []
    for name in options.models:
        found: list[Case] = []
        for mode in options.modes:
            judge = Judge(name, mode, options.folder)
            for devices in options.devices:
                for gib in options.gib:
                    found += judge.cases(devices, gib, options.in_flight)
        console.print(model_table(name, found))
        cases += found
    for line in summary(cases):
        console.print(line)
    return 0 if bars_kept(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
