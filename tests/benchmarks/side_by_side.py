"""What other predictors say of the zoo's peaks, beside autobalance, against what the CPU's own allocator held.

Run it by hand: `OMP_NUM_THREADS=1 python tests/benchmarks/side_by_side.py` (tools: `autobalance[benchmarks]`).
The truth is the largest peak of three real training steps with AdamW under `torch.profiler`. Every tool is called as
its manual says, with all that it can be told: accelerate's estimator knows the model only, torchinfo the model and one
forward, torch-kitsune the model and the shape of a sample, MemTracker the whole loop under fake tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cpu_truth import count
from peak_accuracy import MIB, STEPS
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from zoo import VARIANTS, ZOO, Model, Variant, train

import autobalance

PRECISIONS = ["plain", "bf16 autocast"]
"""The ways to train that every tool can be told of."""
Predictor = Callable[[Model, Variant, dict[str, Tensor]], int]


def by_autobalance(model: Model, variant: Variant, drawn: dict[str, Tensor]) -> int:
    """`autobalance.profile(..., target="cpu").peak()`."""
    profile = autobalance.profile(
        variant.apply(model.make()),
        drawn,
        optimizer=variant.optimizer,
        precision=variant.precision,
        step=model.step,
        target="cpu",
    )
    return profile.peak()


def by_accelerate(model: Model, variant: Variant, drawn: dict[str, Tensor]) -> int:
    """The "Training using Adam" column of `accelerate estimate-memory`."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with torch.device("meta"):
        total, _ = calculate_maximum_sizes(model.make())
    usage = estimate_training_usage(total, "bfloat16" if variant.precision == "bf16-mixed" else "float32")
    return int(max(usage.values()))


def by_torchinfo(model: Model, variant: Variant, drawn: dict[str, Tensor]) -> int:
    """Its "Estimated Total Size"."""
    from torchinfo import summary

    statistics_of = summary(model.make(), input_data=_inputs(drawn), mode="train", verbose=0)
    return int(statistics_of.total_input + statistics_of.total_output_bytes + statistics_of.total_param_bytes)


def by_kitsune(model: Model, variant: Variant, drawn: dict[str, Tensor]) -> int:
    """`kitsune.predict_memory`, its five per cent of overhead included; it knows no autocast, only float32."""
    from kitsune import predict_memory

    inputs = _inputs(drawn)
    sample = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
    with contextlib.redirect_stderr(io.StringIO()):  # where its tracing fails it prints why, and goes on without
        found = predict_memory(model.make(), tuple(sample.shape[1:]), len(sample), optimizer="adamw")
    return int(found.total_bytes)


def by_mem_tracker(model: Model, variant: Variant, drawn: dict[str, Tensor]) -> int:
    """Two steps of the loop under fake tensors of the CPU."""
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        made = model.make()
        fakes = {name: torch.empty_like(tensor, device="cpu") for name, tensor in _shapes(drawn).items()}
        tracker = MemTracker()
        tracker.track_external(made)

        def forget(phase: str) -> None:
            if phase.endswith("forward"):
                tracker.reset_mod_stats()

        with tracker:
            train(made, fakes, model, variant, 2, forget)
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def _shapes(drawn: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in drawn.items()}


def _inputs(drawn: dict[str, Tensor]) -> Any:
    """What the model's forward is given: all of a batch of transformers, the first part of our own."""
    return drawn.get("x", drawn)


PREDICTORS: dict[str, Predictor] = {
    "autobalance": by_autobalance,
    "MemTracker": by_mem_tracker,
    "torch-kitsune": by_kitsune,
    "accelerate": by_accelerate,
    "torchinfo": by_torchinfo,
}


@dataclass(frozen=True)
class Row:
    """One model in one variant: what the allocator held, and by tool the error as a fraction or why there is none."""

    name: str
    truth: int
    errors: dict[str, float | str]


def compare(model: Model, variant: Variant) -> Row:
    """Train for real, and ask every tool."""
    drawn = model.batch(model.size)
    truth = count(lambda mark: train(model.make(), drawn, model, variant, len(STEPS), mark))
    most = max(nbytes for phase, nbytes in truth.peaks.items() if phase.startswith("step "))
    errors: dict[str, float | str] = {}
    for tool, predict in PREDICTORS.items():
        try:
            errors[tool] = predict(model, variant, drawn) / most - 1
        except Exception as error:  # a tool that cannot is a finding, not an end
            errors[tool] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
    return Row(f"{model.name}, {variant.name}", most, errors)


def report(rows: list[Row], console: Console) -> None:
    table = Table(title="error of the predicted peak against the CPU's allocator, AdamW")
    table.add_column("model")
    table.add_column("truth, MiB", justify="right")
    for tool in PREDICTORS:
        table.add_column(tool, justify="right")
    for row in rows:
        shown = [f"{error:+.2%}" if isinstance(error, float) else "fails" for error in row.errors.values()]
        table.add_row(row.name, f"{row.truth / MIB:,.1f}", *shown)
    table.add_section()
    for title, reduce in (("median", statistics.median), ("worst", max)):
        cells = []
        for tool in PREDICTORS:
            known = [abs(error) for row in rows if isinstance(error := row.errors[tool], float)]
            cells.append(f"{reduce(known):.2%}" if known else "none")
        table.add_row(title, "", *cells)
    console.print(table)
    for row in rows:
        for tool, error in row.errors.items():
            if isinstance(error, str):
                console.print(f"{tool} on {row.name}: {error}", style="dim")


WORST = 0.02  # of our own, above which the comparison is no longer what the README says


def main() -> int:
    """Compare all tools, and say whether ours is as right as the README says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO))
    parser.add_argument("--variants", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    rows = [compare(ZOO[model], VARIANTS[variant]) for model in arguments.models for variant in arguments.variants]
    report(rows, Console(width=140))
    ours = [row.errors["autobalance"] for row in rows]
    return 0 if all(isinstance(error, float) and abs(error) <= WORST for error in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
