"""`autobalance compare`: the best split beside other ones, all judged by the same replay and the same clock."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import autobalance
from autobalance.commands.make_plan import add_search_options, search_options
from autobalance.commands.others import Split, other_splits, split_of_file
from autobalance.commands.sources import SOURCE_HELP, add_model_options, profile_of
from autobalance.commands.words import add_devices, devices_of, limits_of
from autobalance.devices.device import Device
from autobalance.devices.words import parse_devices
from autobalance.partitioning.budgets import budgets_of
from autobalance.partitioning.transfers import bytes_moved, crossings_of
from autobalance.profiling.profile import Profile
from autobalance.report.comparison import Contender, comparison_table
from autobalance.report.render import render


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
    profile = profile_of(options, scalable=options.micro_batches != 1, devices=devices)
    limits = limits_of(options)
    contenders, notes = [], []
    try:
        plan = autobalance.plan(profile, list(targets), **search_options(options))
        contenders.append(_contender_of_plan(plan, profile))
    except autobalance.InfeasiblePlanError as error:
        notes.append(f"autobalance has no plan: {error}")
    splits = other_splits(profile, budgets_of(targets, **limits))
    for split in [*splits, *map(split_of_file, options.map)]:
        if split.device_map is None:
            notes.append(f"{split.name} has no split to judge: {split.reason}")
            contenders.append(Contender(split.name))
            continue
        contenders.append(_contender_of_split(profile, split, targets, limits))
    print(render(comparison_table(contenders)))
    for note in notes:
        print(note)


def _contender_of_plan(plan: autobalance.Plan, profile: Profile) -> Contender:
    return Contender(
        "autobalance",
        plan.peaks,
        plan.budgets,
        plan.step_time,
        sum(bytes_moved(crossings_of(profile), plan.assignment, plan.root).values()),
        _how(plan),
    )


def _how(plan: autobalance.Plan) -> str:
    return f"({plan.schedule}, {plan.micro_batches} parts)" if plan.micro_batches > 1 else ""


def _contender_of_split(
    profile: Profile, split: Split, targets: Sequence[Device], limits: Mapping[str, Any]
) -> Contender:
    assert split.device_map is not None
    found = autobalance.score(profile, split.device_map, list(targets), root=split.root, **limits)
    moved = bytes_moved(crossings_of(profile), found.assignment, found.root)
    return Contender(split.name, found.peaks, found.budgets, found.step_time, sum(moved.values()))
