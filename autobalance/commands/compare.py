"""`autobalance compare`: the best split beside other ones, all judged by the same replay and the same clock."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

import autobalance
from autobalance.commands.make_plan import add_search_options, search_options
from autobalance.commands.others import Split, other_splits, split_of_file
from autobalance.commands.sources import SOURCE_HELP, add_model_options, is_profile_file, profile_of
from autobalance.commands.words import add_devices, devices_of, limits_of
from autobalance.devices.device import Device
from autobalance.devices.words import parse_devices
from autobalance.partitioning.budgets import budgets_of
from autobalance.partitioning.rivals.alternatives import alternatives_of
from autobalance.partitioning.rivals.verdict import verdict
from autobalance.partitioning.score import Score
from autobalance.profiling.profile import Profile
from autobalance.report.alternatives import alternatives_table
from autobalance.report.comparison import Contender, comparison_table
from autobalance.report.folding import Sentences
from autobalance.report.render import render
from autobalance.timelines.scaling import NOT_SCALED


def add(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options.

    Example:
        >>> add(commands.add_parser("compare"))

    Args:
        parser: of the command.
    """
    parser.add_argument("source", metavar="model", help=SOURCE_HELP)
    add_devices(parser)
    add_model_options(parser)
    add_search_options(parser)
    parser.add_argument(
        "--map",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a device_map as JSON, or a saved plan; may be repeated",
    )


def run(options: argparse.Namespace) -> None:
    """Plan, judge the others, print them side by side.

    Example:
        >>> run(parser.parse_args(["compare", "profile.json", "4x24GiB"]))     # doctest: +SKIP

    Args:
        options: as `add` describes them.

    Raises:
        ValueError, TypeError, ImportError, OSError: what is wrong with the input.
    """
    devices = devices_of(options)
    targets = parse_devices(devices)
    profile = profile_of(options, scalable=True, devices=devices)
    judge = _Judge(profile, targets, limits_of(options))
    plan: autobalance.Plan | None = None
    contenders, notes = [], []
    try:
        plan = autobalance.plan(profile, list(targets), **search_options(options))
        contenders.append(_contender_of_plan(plan))
        judge.micro_batches, judge.schedule = plan.micro_batches, plan.schedule
        if plan.micro_batches > 1:
            notes.append(
                f"all run {plan.schedule} with the batch in {plan.micro_batches} parts, where nothing else is said"
            )
    except autobalance.InfeasiblePlanError as error:
        notes.append(f"autobalance has no plan: {error}")
    for split in [*other_splits(profile, judge.budgets), *map(split_of_file, options.map)]:
        contender, reason = judge.contender(split)
        contenders.append(contender)
        notes += [f"{split.name}: {reason}"] if reason else []
    lines = tuple(line for note in notes for line in note.splitlines())
    told: list[RenderableType] = [Sentences(lines), ""] if lines else []
    print(render(Group(comparison_table(contenders), *told, _instead(plan, judge, options))))


class _Judge:
    """Judges splits on the same devices, as our plan is judged: by the same replay, schedule and micro-batches."""

    def __init__(self, profile: Profile, targets: Sequence[Device], limits: Mapping[str, Any]) -> None:
        self.profile, self.targets, self.limits = profile, targets, limits
        self.budgets = budgets_of(targets, **limits)
        self.micro_batches, self.schedule = 1, "naive"

    def contender(self, split: Split) -> tuple[Contender, str]:
        """A line of the table, and what there is to say beside it."""
        if split.device_map is None:
            return Contender(split.name), split.reason
        try:
            found = self.score(split.device_map)
        except ValueError as error:  # a plan for another model, a map that leaves blocks out
            return Contender(split.name), str(error)
        contender = Contender(
            split.name,
            found.peaks,
            found.budgets,
            found.step_time,
            found.transferred,
            "" if self._is_ours(found) else _how(found.schedule, found.micro_batches),
        )
        return contender, "; ".join(found.notes)

    def _is_ours(self, found: Score) -> bool:
        return (found.schedule, found.micro_batches) == (self.schedule, self.micro_batches)

    def score(self, device_map: Any) -> Score:
        """The score of a map, a plan, or a device for each block."""
        ways: dict[str, Any] = {"micro_batches": self.micro_batches, "schedule": self.schedule}
        if isinstance(device_map, autobalance.Plan):  # which has a schedule of its own
            ways = {}
        return autobalance.score(self.profile, device_map, list(self.targets), **self.limits, **ways)


def _contender_of_plan(plan: autobalance.Plan) -> Contender:
    return Contender(
        "autobalance",
        plan.peaks,
        plan.budgets,
        plan.step_time,
        plan.micro_batches * sum(stage.received for stage in plan.stages),
    )


def _how(schedule: str, micro_batches: int) -> str:
    return f"({schedule}, {micro_batches} parts)" if micro_batches > 1 else f"({schedule})"


def _instead(plan: autobalance.Plan | None, judge: _Judge, options: argparse.Namespace) -> RenderableType:
    """What could be done instead of a split, and which is the better choice."""
    try:
        _check_can_share_out(judge, options)
        others = alternatives_of(judge.profile, judge.targets, judge.budgets)
    except ValueError as error:
        return Sentences((f"DDP, FSDP and ZeRO are left out: {error}",))
    if plan is None:
        fitting = [other.name for other in others if other.fits]
        told = f"Of these {', '.join(fitting)} would fit." if fitting else "None of these fits."
    else:
        # What is recomputed or offloaded only the plan itself knows.
        told = verdict(plan if set(plan.saving) - {"keep"} else judge.score(plan), others)
    return Group(alternatives_table(others), "", Sentences((told,)))


def _check_can_share_out(judge: _Judge, options: argparse.Namespace) -> None:
    """Refuse a batch that devices cannot run a part of each, in the words of the command line."""
    profile, count = judge.profile, len(judge.targets)
    is_made = is_profile_file(options.source)
    if profile.batch_size == 1 < count:
        again = "make the profile again with --scalable and" if is_made else "say"
        raise ValueError(f"1 sample cannot be shared out over {count} devices; {again} --batch {count} or more")
    told = [note for note in profile.notes if note.startswith(NOT_SCALED)]
    if told:
        raise ValueError("; ".join(told))
    if is_made and not profile.batch_size:
        raise ValueError(
            "each device would run a part of the batch, and this profile does not say how bytes depend on the number "
            "of samples; make it again with autobalance profile --scalable"
        )
