"""`autobalance profile`: what each block of a model costs."""

from __future__ import annotations

import argparse
from pathlib import Path

from autobalance.commands.sources import add_model_options, load_source


def add(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options.

    Example:
        >>> add(commands.add_parser("profile"))

    Args:
        parser: of the command.
    """
    parser.add_argument(
        "source",
        metavar="factory",
        help="FILE.py:FUNCTION or MODULE:FUNCTION; the function returns a model or (model, batch). Or hf:NAME",
    )
    add_model_options(parser)
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step (default: %(default)s)")
    parser.add_argument("--clip", type=float, help="largest norm of the gradients")
    parser.add_argument("--scalable", action="store_true", help="find out the bytes of batches of any size, too")
    parser.add_argument("--measure", metavar="DEVICE", help='run every block on this device, such as "cuda:0"')
    parser.add_argument("-o", "--output", type=Path, help="save the profile in this file, as JSON")


def run(options: argparse.Namespace) -> None:
    """Profile, print, save.

    Example:
        >>> run(parser.parse_args(["profile", "net.py:make"]))     # doctest: +SKIP

    Args:
        options: as `add` describes them.

    Raises:
        ValueError, TypeError, ImportError, RuntimeError: what is wrong with the input.
    """
    source = load_source(options, on_meta=options.measure is None)
    profile = source.profiled(
        options,
        target=options.target,
        accumulate=options.accumulate,
        clip=options.clip,
        scalable=options.scalable,
        measure=options.measure,
    )
    print(profile.report())
    for note in source.notes:
        print(note)
    if options.output is not None:
        profile.save(options.output)
        print(f"Saved in {options.output}. Next: autobalance plan {options.output} 4x24GiB")
