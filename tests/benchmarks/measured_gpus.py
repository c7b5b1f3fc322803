"""Predictions against real GPUs: what nvidia-smi showed of 3,200 training runs on an A100, measured by others.

Run it by hand, with a torch that is built for CUDA (no GPU is needed) and TIMM:
`python tests/benchmarks/measured_gpus.py --data DIR --models 60`. DIR holds `timm_a100.csv` and `mlp_a100.csv`. What
nvidia-smi shows is what the caching allocator reserved, which is predicted, and the CUDA context with libraries and
start-up, which is one constant for a file. Exit status 1 if a median is above its bar.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from measured_cache import Cache
from measured_figures import MIB, Compared, by_group, constant, errors, errors_of_differences, quartiles
from measured_runs import read_mlps, read_timm, went_through
from measured_training import Predicted, predict_timm, reserved_by_mlp
from rich.console import Console
from rich.progress import track
from rich.table import Table

MLP_BAR = 0.10
TRANSFORMER_BAR = 0.04
TIMM_BAR = 0.08
DIFFERENCE_BAR = 0.05


def main() -> int:
    """Compare a sample of both files, and say whether the medians kept their bars."""
    options = _options()
    torch.set_num_threads(1)
    console, cache = Console(), Cache(options.cache)
    kept = True
    if "mlp" in options.only:
        kept &= _compare_mlps(options, console)
    if "timm" in options.only:
        kept &= _compare_timm(options, console, cache)
    console.print("bars kept" if kept else "a bar was missed")
    return 0 if kept else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the measured runs")
    parser.add_argument("--models", type=int, default=60, help="of each file, drawn at random; 0: all (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (%(default)s)")
    parser.add_argument("--cache", type=Path, help="folder that keeps predictions of TIMM's models")
    parser.add_argument("--only", nargs="+", choices=("mlp", "timm"), default=("mlp", "timm"), help="files to compare")
    parser.add_argument("--details", action="store_true", help="list families and the runs that are furthest off")
    options = parser.parse_args()
    if not options.data.is_dir():
        parser.error(f"--data: there is no folder {options.data}")
    return options


def _drawn(names: Sequence[str], options: argparse.Namespace) -> list[str]:
    if not options.models or options.models >= len(names):
        return list(names)
    return random.Random(options.seed).sample(list(names), options.models)


def _compare_mlps(options: argparse.Namespace, console: Console) -> bool:
    mlps = {f"{index} {mlp.name}": mlp for index, mlp in enumerate(read_mlps(options.data / "mlp_a100.csv"))}
    runs = [
        Compared(name, "", False, mlps[name].batch_size, mlps[name].mib, reserved_by_mlp(mlps[name]) / MIB)
        for name in track(_drawn(list(mlps), options), "multilayer perceptrons", console=console)
    ]
    table = _table()
    beside = constant(runs)
    kept = _add(table, "MLPs, above the constant", errors(runs, beside), MLP_BAR)
    _add(table, "MLPs, all that was measured", errors(runs, beside, above=False))
    console.print(table, f"{len(runs)} runs; constant {beside:,.0f} MiB")
    if options.details:
        _show_worst(runs, beside, console)
    return kept


def _compare_timm(options: argparse.Namespace, console: Console, cache: Cache) -> bool:
    measured = read_timm(options.data / "timm_a100.csv")
    left_out: Counter[str] = Counter()
    published: list[Compared] = []
    runs: list[Compared] = []
    for name in track(_drawn(sorted(measured), options), "TIMM models", console=console):
        try:
            predicted = _predicted(name, measured[name], cache)
        except Exception as error:  # one model of hundreds should not end the comparison of all others
            console.print(f"{name} cannot be profiled: {type(error).__name__}: {error}")
            left_out["are of models that cannot be profiled"] += len(measured[name])
            continue
        used = went_through(measured[name]) if predicted.trains else {}
        why = "failed, or were caught while cuDNN tried kernels" if predicted.trains else "have no classes to train"
        left_out[why] += len(measured[name]) - len(used)
        found = [
            Compared(name, predicted.family, predicted.is_transformer, size, measured[name][size], nbytes / MIB)
            for size, nbytes in predicted.reserved.items()
        ]
        published.extend(found)
        runs.extend(run for run in found if run.batch_size in used)
    table = _table()
    beside = constant(runs)
    transformers = [run for run in runs if run.is_transformer]
    others = [run for run in runs if not run.is_transformer]
    kept = _add(table, "transformers, above the constant", errors(transformers, beside), TRANSFORMER_BAR)
    kept &= _add(table, "all models, above the constant", errors(runs, beside), TIMM_BAR)
    kept &= _add(table, "all models, from batch to batch", errors_of_differences(runs), DIFFERENCE_BAR)
    _add(table, "others, above the constant", errors(others, beside))
    _add(table, "transformers, from batch to batch", errors_of_differences(transformers))
    _add(table, "all models, all that was measured", errors(runs, beside, above=False))
    _add(table, "the same, failed runs among them", errors(published, beside, above=False))
    console.print(table, f"{len(runs)} runs of {len({run.model for run in runs})} models; constant {beside:,.0f} MiB")
    for why, count in left_out.items():
        if count:
            console.print(f"{count} runs {why}")
    if options.details:
        _show_families(runs, beside, console)
        _show_worst(runs, beside, console)
    return kept


def _predicted(name: str, measured: dict[int, int], cache: Cache) -> Predicted:
    fields = cache.get(name, lambda: asdict(predict_timm(name, sorted(measured))))
    return Predicted(**{**fields, "reserved": {int(size): nbytes for size, nbytes in fields["reserved"].items()}})


def _table() -> Table:
    table = Table("errors", box=None)
    for heading in ("first quartile", "median", "third quartile", "bar"):
        table.add_column(heading, justify="right")
    return table


def _add(table: Table, name: str, values: Sequence[float], bar: float | None = None) -> bool:
    """Add a line, and say whether its median keeps the bar."""
    if not values:
        table.add_row(name, "-", "-", "-", "" if bar is None else f"{bar:.0%}")
        return bar is None
    found = quartiles(values)
    table.add_row(name, *(f"{value:.2%}" for value in found), "" if bar is None else f"{bar:.0%}")
    return bar is None or found[1] <= bar


def _show_families(runs: Sequence[Compared], beside: float, console: Console) -> None:
    table = _table()
    for family, group in by_group(runs).items():
        _add(table, f"{family}, {len({run.model for run in group})} models", errors(group, beside))
    console.print(table)


def _show_worst(runs: Sequence[Compared], beside: float, console: Console, count: int = 20) -> None:
    found = sorted(zip(errors(runs, beside), runs, strict=True), key=lambda pair: -abs(pair[0]))
    for error, run in found[:count]:
        predicted = run.reserved + beside
        console.print(f"{error:+7.1%}  {run.model}, batch {run.batch_size}: {predicted:,.0f} MiB, not {run.mib:,.0f}")


if __name__ == "__main__":
    sys.exit(main())
