"""The command line: `autobalance demo | profile | plan | compare | calibrate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import autobalance
from autobalance.commands import calibrate, compare, demo, make_plan, make_profile


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Example:
        >>> main(["plan", "profile.json", "4x24GiB"])  # doctest: +SKIP

    Args:
        arguments: words after the program's name; None: those it was started with.

    Returns:
        The exit status: 0, or 1 after a message about what is wrong with the input.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["demo"]:  # has options of its own
        demo.run(words[1:])
        return 0
    options = _parser().parse_args(words)
    try:
        options.run(options)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"autobalance {options.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autobalance", description="Split a model over several devices.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {autobalance.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("demo", help="train a model that fits on none of four devices", add_help=False)
    for name, command, told in (
        ("profile", make_profile, "measure what each block of a model costs"),
        ("plan", make_plan, "the best split of a model, or of its profile"),
        ("compare", compare, "the best split beside other ones, all judged by the same replay"),
        ("calibrate", calibrate, "measure the devices of this machine once, about a minute each"),
    ):
        one = commands.add_parser(name, help=told)
        command.add(one)
        one.set_defaults(run=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
