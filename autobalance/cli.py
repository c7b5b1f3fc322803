"""The command line: `autobalance demo | profile | plan | compare | calibrate`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import autobalance

if TYPE_CHECKING:
    from autobalance.partitioning.score import Score
    from autobalance.profiling.profile import Profile

DEVICES_HELP = 'devices in words: "8x80GiB", "2x40GiB,2x16GiB"; default: the GPUs of this machine'


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
        _example("char_gpt").main(words[1:])
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

    profile = commands.add_parser("profile", help="measure what each block of a model costs")
    profile.add_argument("factory", help="FILE.py:FUNCTION or MODULE:FUNCTION; the function returns (model, batch)")
    profile.add_argument("--optimizer", default="AdamW", help="class in torch.optim, or none (default: %(default)s)")
    profile.add_argument("--precision", default="32-true", help="as the Trainer has it (default: %(default)s)")
    profile.add_argument("--inference", action="store_true", help="a forward pass without gradients")
    profile.add_argument(
        "--target", help='whose kernels: "A100-80GB", "cuda", "cpu", "simulated" (default: the GPU here, else an A100)'
    )
    profile.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step (default: %(default)s)")
    profile.add_argument("--clip", type=float, help="largest norm of the gradients")
    profile.add_argument("--scalable", action="store_true", help="find out the bytes of batches of any size, too")
    profile.add_argument("--measure", metavar="DEVICE", help='run every block on this device, such as "cuda:0"')
    profile.add_argument("-o", "--output", type=Path, help="save the profile in this file, as JSON")
    profile.set_defaults(run=_profile)

    calibrate = commands.add_parser("calibrate", help="measure the devices of this machine once, about a minute each")
    calibrate.add_argument("devices", nargs="*", help='such as "cuda:0"; default: all GPUs')
    calibrate.add_argument("--force", action="store_true", help="measure again what is known")
    calibrate.set_defaults(run=_calibrate)

    plan = commands.add_parser("plan", help="the best split of a profiled model")
    _add_profile_and_devices(plan)
    plan.add_argument(
        "--policy", default="auto", help="balanced, balanced_low_0, minimize_first_gpu_memory or sequential"
    )
    plan.add_argument("--pin", type=_pin, action="append", default=[], metavar="BLOCK=DEVICE", help="may be repeated")
    plan.add_argument("-o", "--output", type=Path, help="save the plan in this file, as JSON")
    plan.set_defaults(run=_plan)

    compare = commands.add_parser("compare", help="the best split beside other ones, all judged by the same replay")
    _add_profile_and_devices(compare)
    compare.add_argument(
        "--map",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a device_map as JSON, or a saved plan; may be repeated",
    )
    compare.set_defaults(run=_compare)
    return parser


def _add_profile_and_devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", type=Path, help="a file that `autobalance profile -o` or `Profile.save` wrote")
    parser.add_argument("devices", nargs="?", help=DEVICES_HELP)
    parser.add_argument(
        "--max-memory", type=_limit, action="append", default=[], metavar="DEVICE=SIZE", help="may be repeated: 0=10GiB"
    )
    parser.add_argument(
        "--reserve",
        type=_reserve,
        default="auto",
        help="size or share to leave free on each device (default: %(default)s)",
    )


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


def _pin(text: str) -> tuple[str, int]:
    block, _, device = text.rpartition("=")
    if not block or not device.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not BLOCK=DEVICE, such as head=0")
    return block, int(device)


def _profile(options: argparse.Namespace) -> None:
    from torch import optim

    model, batch = _load(options.factory)
    optimizer = None if options.optimizer.lower() == "none" or options.inference else _named(optim, options.optimizer)
    profile = autobalance.profile(
        model,
        batch,
        optimizer=optimizer,
        precision=options.precision,
        training=not options.inference,
        target=options.target,
        accumulate=options.accumulate,
        clip=options.clip,
        scalable=options.scalable,
        measure=options.measure,
    )
    print(profile.report())
    if options.output is not None:
        profile.save(options.output)
        print(f"Saved in {options.output}. Next: autobalance plan {options.output} 4x24GiB")


def _calibrate(options: argparse.Namespace) -> None:
    from autobalance.measuring.calibration import cache_directory, calibrate
    from autobalance.report.render import render
    from autobalance.report.tables import calibration_table

    names = options.devices or None
    print(render(calibration_table(calibrate(names, options.force))))
    print(f"Kept in {cache_directory()}, for profiles and plans on this machine.")


def _plan(options: argparse.Namespace) -> None:
    plan = autobalance.plan(
        autobalance.Profile.load(options.profile),
        options.devices,
        policy=options.policy,
        max_memory=dict(options.max_memory) or None,
        reserve=options.reserve,
        pin=dict(options.pin) or None,
    )
    print(plan)
    if options.output is not None:
        plan.save(options.output)
        print(f"Saved in {options.output}")


def _compare(options: argparse.Namespace) -> None:
    from autobalance.report.render import render
    from autobalance.report.scores import score_table

    profile = autobalance.Profile.load(options.profile)
    limits: dict[str, Any] = {"max_memory": dict(options.max_memory) or None, "reserve": options.reserve}
    scores: dict[str, Score] = {}
    notes = []
    try:
        best = autobalance.plan(profile, options.devices, **limits)
        scores["autobalance"] = autobalance.score(profile, best.device_map, options.devices, root=best.root, **limits)
        count = len(best.devices)
    except autobalance.InfeasiblePlanError as error:
        notes.append(f"autobalance has no plan: {error}")
        count = len(error.budget)
    scores["equal weights"] = autobalance.score(profile, equal_weights(profile, count), options.devices, **limits)
    for path in options.map:
        device_map, root = _split(path)
        scores[path.name] = autobalance.score(profile, device_map, options.devices, root=root, **limits)
    print(render(score_table(scores)))
    for note in notes:
        print(note)


def equal_weights(profile: Profile, devices: int) -> list[int]:
    """Split blocks in call order into parts of about equal weights, blind to everything else that memory holds.

    This is the usual split by hand, and that of tools that plan by the size of the weights.

    Args:
        profile: what the blocks cost.
        devices: how many there are.

    Returns:
        Device index per block.
    """
    total = sum(block.weights for block in profile.blocks) or 1
    assignment = []
    before = 0
    for block in profile.blocks:
        middle = before + block.weights / 2
        assignment.append(min(int(middle * devices / total), devices - 1))
        before += block.weights
    return assignment


def _split(path: Path) -> tuple[Any, int | None]:
    """The device_map in a file, with the root device if it is a plan's."""
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or content.get("kind") != "plan":
        return content, None
    plan = autobalance.Plan.load(path)
    return plan.device_map, plan.root


def _load(place: str) -> tuple[Any, Any]:
    """Call the factory at FILE.py:FUNCTION or MODULE:FUNCTION."""
    where, colon, name = place.rpartition(":")
    if not colon:
        raise ValueError(f"{place!r} names no function: write FILE.py:FUNCTION or MODULE:FUNCTION")
    if where.endswith(".py"):
        module = _run_file(Path(where))
    else:
        sys.path.insert(0, "")  # as `python -m` has it, so that a module in this folder is found
        module = importlib.import_module(where)
    made = _named(module, name)()
    if not isinstance(made, tuple) or len(made) != 2:
        raise TypeError(f"{place} returned a {type(made).__name__}; it must return the pair (model, batch)")
    return made


def _named(module: Any, name: str) -> Any:
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{module.__name__} has no {name!r} that can be called")
    return getattr(module, name)


def _example(name: str) -> Any:
    """The module of an example: of the installed package, or of the repository that this package lies in."""
    package = Path(autobalance.__file__).parent
    in_repository = package.parent / "examples" / f"{name}.py"
    return _run_file(in_repository if in_repository.is_file() else package / "_examples" / f"{name}.py")


def _run_file(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # pickle and dataclasses look a module up by its name
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
