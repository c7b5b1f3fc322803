"""`autobalance calibrate`: the devices of this machine, measured once."""

from __future__ import annotations

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options.

    Example:
        >>> add(commands.add_parser("calibrate"))

    Args:
        parser: of the command.
    """
    parser.add_argument("devices", nargs="*", help='such as "cuda:0"; default: all GPUs')
    parser.add_argument("--force", action="store_true", help="measure again what is known")


def run(options: argparse.Namespace) -> None:
    """Measure, print, keep.

    Example:
        >>> run(parser.parse_args(["calibrate", "cuda:0"]))     # doctest: +SKIP

    Args:
        options: as `add` describes them.

    Raises:
        ValueError, RuntimeError: a device that is not there.
    """
    from autobalance.measuring.calibration import cache_directory, calibrate
    from autobalance.report.render import render
    from autobalance.report.tables import calibration_table

    print(render(calibration_table(calibrate(options.devices or None, options.force))))
    print(f"Kept in {cache_directory()}, for profiles and plans on this machine.")
