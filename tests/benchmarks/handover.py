"""What running in micro-batches costs the host: the hand-over between them, and a whole step beside plain Lightning's.

Run it by hand from the repository: `OMP_NUM_THREADS=1 python -m tests.benchmarks.handover`; a few minutes. All devices
are the CPU, so that nothing is gained by overlap and what is seen is the cost alone.

The hand-over is that of blocks that do nothing: a step whose micro-batches are suspended at every stage, less the same
step in which each runs through. The step is that of the example's model, in 8 micro-batches on 4 devices; it and plain
Lightning's take turns. Exit status 1 where it takes more than 1.10 of the time.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autobalance
from autobalance.blocks import Blocks
from autobalance.execution.pipeline import Pipeline
from autobalance.placement.install import install
from autobalance.placement.locate import DeviceLocator
from examples.char_gpt import BATCH, CONTEXT, LAYERS, CharGPT
from tests.benchmarks.in_turn import Runner, in_turn

LIMIT = 1.10
STAGES, MICRO_BATCHES, CHARACTERS = 4, 8, 96
HOST = torch.device("cpu")


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class TrivialSteps:
    """Steps of blocks that do nothing, one on each stage.

    Example:
        >>> TrivialSteps("1f1b", stages=4).run(count=8)

    Args:
        schedule: of the pipeline.
        stages: how many.
    """

    def __init__(self, schedule: str, stages: int) -> None:
        self._model = nn.Sequential(*(Nothing() for _ in range(stages)))
        self._batch = torch.zeros(1)
        blocks, places = Blocks.of(self._model, [(block,) for block in self._model]), [HOST] * stages
        self._pipeline = Pipeline(schedule, range(stages), range(stages))
        self._installed = install(self._model, blocks, places, DeviceLocator(places), visitor=self._pipeline)

    def run(self, count: int) -> float:
        """Seconds of one step in `count` micro-batches."""
        start = time.perf_counter()
        with self._installed.glue():
            self._pipeline.train(count, lambda number: self._model(self._batch), lambda numbers: None)
        return time.perf_counter() - start


def handover(stages: int, count: int, repeats: int) -> tuple[float, float]:
    """Seconds of a hand-over, for each micro-batch and stage, and of a visit of a block that hands nothing over.

    Example:
        >>> handover(stages=4, count=8, repeats=100)

    Args:
        stages: how many.
        count: of micro-batches.
        repeats: steps of each kind, which take turns.
    """
    suspended, through = TrivialSteps("1f1b", stages), TrivialSteps("naive", stages)
    pairs = [(suspended.run(count), through.run(count)) for _ in range(repeats + 3)][3:]
    cost = statistics.median(slow - fast for slow, fast in pairs)
    return cost / (stages * count), statistics.median(fast for _, fast in pairs) / (stages * count)


def steps(turns: int) -> list[list[float]]:
    """Seconds of each step of the example's model: of plain Lightning, of whole batches split over devices, in parts.

    Example:
        >>> plain, whole, parts = steps(turns=50)

    Args:
        turns: steps of each.
    """
    torch.manual_seed(0)
    batches = [torch.randint(CHARACTERS, (BATCH, CONTEXT + 1)) for _ in range(turns + 2)]
    names = ["embed", *(f"layers.{index}" for index in range(LAYERS)), "head"]
    pin = {name: index * STAGES // len(names) for index, name in enumerate(names)}
    whole = autobalance.SelfBalanceStrategy(pin=pin, schedule="naive")
    parts = autobalance.SelfBalanceStrategy(pin=pin, schedule="1f1b", micro_batches=MICRO_BATCHES)
    runners = [Runner("pytorch_lightning", CharGPT(CHARACTERS), batches, devices=1)]
    runners += [
        Runner("pytorch_lightning", CharGPT(CHARACTERS), batches, devices=STAGES, strategy=strategy)
        for strategy in (whole, parts)
    ]
    return in_turn(runners, turns)


def main() -> int:
    """Print both costs, and say whether a step in parts is within the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=60, help="steps of each Trainer (%(default)s)")
    parser.add_argument("--repeats", type=int, default=100, help="steps of blocks that do nothing (%(default)s)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    console = Console()
    table = Table("stages", "micro-batches", "hand-over", "visit of a block", title="for each micro-batch and stage")
    for stages, count in ((2, 8), (4, 8), (4, 16), (8, 32)):
        cost, visit = handover(stages, count, options.repeats)
        table.add_row(str(stages), str(count), f"{1e6 * cost:.0f} µs", f"{1e6 * visit:.0f} µs")
    console.print(table)
    plain, whole, parts = (statistics.median(seconds) for seconds in steps(options.turns))
    console.print(f"plain Lightning: {1000 * plain:.1f} ms a step, median of {options.turns}")
    console.print(f"whole batches on {STAGES} devices: {whole / plain:.3f} of that")
    console.print(f"{MICRO_BATCHES} micro-batches on {STAGES} devices: {parts / plain:.3f}, at most {LIMIT}")
    return 0 if parts / plain <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
