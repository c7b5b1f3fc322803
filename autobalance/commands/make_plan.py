"""`autobalance plan`: the best split of a model over devices."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import autobalance
from autobalance.commands.sources import SOURCE_HELP, add_model_options, profile_of
from autobalance.commands.words import add_devices, devices_of, limits_of, number_or_auto, pin
from autobalance.partitioning.chains.policies import POLICIES
from autobalance.partitioning.largest_batch import largest_batch

if TYPE_CHECKING:
    from autobalance.profiling.profile import Profile

_CHOICES = {"auto": "auto", "yes": True, "no": False}


def add(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options.

    Example:
        >>> add(commands.add_parser("plan"))

    Args:
        parser: of the command.
    """
    parser.add_argument("source", metavar="model", help=SOURCE_HELP)
    add_devices(parser)
    add_model_options(parser)
    add_search_options(parser)
    parser.add_argument("--policy", default="auto", help=", ".join(POLICIES))
    parser.add_argument("--max-batch", action="store_true", help="the largest batch that fits, for every policy")
    parser.add_argument("-o", "--output", type=Path, help="save the plan in this file, as JSON")
    parser.add_argument("--report", type=Path, metavar="FILE", help="draw the plan in this file, as HTML")


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Let a command be told what a plan may do.

    Example:
        >>> add_search_options(parser)

    Args:
        parser: of the command.
    """
    parser.add_argument("--micro-batches", type=number_or_auto, default="auto", metavar="N", help="parts of a batch")
    parser.add_argument("--schedule", default="auto", help="auto, naive, gpipe, 1f1b or looped")
    parser.add_argument(
        "--recompute",
        nargs="?",
        const="yes",
        default="auto",
        choices=list(_CHOICES),
        help="compute tensors again in the backward where they do not fit",
    )
    parser.add_argument("--offload", action="store_true", help="keep in host memory what does not fit")
    parser.add_argument("--pin", type=pin, action="append", default=[], metavar="BLOCK=DEVICE", help="may be repeated")


def search_options(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `plan` for what it may do and use.

    Example:
        >>> autobalance.plan(profile, "4x24GiB", **search_options(options))

    Args:
        options: as `add_devices` and `add_search_options` describe them.
    """
    return {
        **limits_of(options),
        "pin": dict(options.pin) or None,
        "micro_batches": options.micro_batches,
        "schedule": options.schedule,
        "recompute": _CHOICES[options.recompute],
        "offload": options.offload,
    }


def run(options: argparse.Namespace) -> None:
    """Plan, print, save, draw.

    Example:
        >>> run(parser.parse_args(["plan", "profile.json", "4x24GiB"]))     # doctest: +SKIP

    Args:
        options: as `add` describes them.

    Raises:
        InfeasiblePlanError: nothing fits.
        ValueError, TypeError, ImportError, OSError: what is wrong with the input.
    """
    devices = devices_of(options)
    # Only parts of a batch, and other batches, ask for bytes of other sizes.
    in_parts = options.micro_batches != 1 and options.schedule != "naive"
    profile = profile_of(options, scalable=options.max_batch or in_parts, devices=devices)
    question = search_options(options)
    plan: autobalance.Plan | None = None
    try:
        plan = autobalance.plan(profile, devices, policy=options.policy, **question)
        print(plan)
    except autobalance.InfeasiblePlanError as error:
        # A smaller batch may fit, which is what --max-batch asks.
        if not options.max_batch:
            raise
        print(f"autobalance plan: {error}", file=sys.stderr)
    if options.max_batch:
        parts = plan.micro_batches if plan is not None else question["micro_batches"]
        print(_largest(profile, devices, {**question, "micro_batches": 1 if parts == "auto" else parts}))
    if plan is not None and options.output is not None:
        plan.save(options.output)
        print(f"Saved in {options.output}")
    if plan is not None and options.report is not None:
        plan.report(options.report)
        print(f"Drawn in {options.report}")


def _largest(profile: Profile, devices: str | None, question: dict[str, Any]) -> str:
    """The largest batch of every policy, in words."""
    found = [f"{policy} {largest_batch(profile, devices, policy=policy, **question) or 'none'}" for policy in POLICIES]
    parts = f", each in {question['micro_batches']} parts" if question["micro_batches"] > 1 else ""
    return f"largest batch that fits, in samples{parts}: {', '.join(found)}"
