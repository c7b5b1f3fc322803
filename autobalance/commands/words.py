"""Options that several commands share, and how their words are read."""

from __future__ import annotations

import argparse
from typing import Any

DEVICES_HELP = 'devices in words: "8x80GiB", "2x40GiB,2x16GiB", "8xA100-80GB"; default: the GPUs of this machine'


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Let a command be told of devices and how much of their memory it may use.

    Example:
        >>> add_devices(parser)

    Args:
        parser: of the command.
    """
    parser.add_argument("positional_devices", nargs="?", metavar="DEVICES", help=DEVICES_HELP)
    parser.add_argument("--devices", help="the same, as an option")
    parser.add_argument(
        "--max-memory", type=_limit, action="append", default=[], metavar="DEVICE=SIZE", help="may be repeated: 0=10GiB"
    )
    parser.add_argument(
        "--reserve",
        type=_reserve,
        default="auto",
        help="size or share to leave free on each device (default: %(default)s)",
    )


def devices_of(options: argparse.Namespace) -> str | None:
    """The devices in words, None for those of this machine.

    Example:
        >>> devices_of(parser.parse_args(["plan", "profile.json", "4x24GiB"]))
        '4x24GiB'

    Args:
        options: of a command that `add_devices` was called for.

    Raises:
        ValueError: they are given twice.
    """
    given: list[str] = [words for words in (options.positional_devices, options.devices) if words is not None]
    if len(given) == 2:
        raise ValueError(f"devices are given twice: {given[0]!r} and --devices {given[1]!r}; leave one of them out")
    return given[0] if given else None


def limits_of(options: argparse.Namespace) -> dict[str, Any]:
    """`max_memory=` and `reserve=` of `plan` and `score`.

    Example:
        >>> autobalance.plan(profile, devices_of(options), **limits_of(options))

    Args:
        options: of a command that `add_devices` was called for.
    """
    return {"max_memory": dict(options.max_memory) or None, "reserve": options.reserve}


def pin(text: str) -> tuple[str, int]:
    """A block and the position of its device.

    Example:
        >>> pin("head=0")
        ('head', 0)

    Args:
        text: BLOCK=DEVICE.

    Raises:
        ArgumentTypeError: it is something else.
    """
    block, _, device = text.rpartition("=")
    if not block or not device.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not BLOCK=DEVICE, such as head=0")
    return block, int(device)


def number_or_auto(text: str) -> int | str:
    """A whole number above 0, or "auto".

    Example:
        >>> number_or_auto("8")
        8

    Args:
        text: the word.

    Raises:
        ArgumentTypeError: it is something else.
    """
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number above 0 nor auto")
    return int(text)


def _limit(text: str) -> tuple[int, str]:
    device, _, size = text.partition("=")
    if not device.isdecimal() or not size:
        raise argparse.ArgumentTypeError(f"{text!r} is not DEVICE=SIZE, such as 0=10GiB")
    return int(device), size


def _reserve(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text  # a size in words, which the planner reads
