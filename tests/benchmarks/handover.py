"""What running in micro-batches costs the host: the hand-over between them, and a whole step beside plain Lightning's.

Run it by hand from the repository: `OMP_NUM_THREADS=1 python -m tests.benchmarks.handover`; a few minutes. All devices
are the CPU, so that nothing is gained by overlap and what is seen is the cost alone.

The hand-over is that of blocks that do nothing: a step whose micro-batches are suspended at every stage, less the same
step in which each runs through. The step is that of the example's model, in 8 micro-batches on 4 devices; it and plain
Lightning's take turns. Kernels on parts of a batch take longer together than kernels on the whole of it, and Python
calls the model once for each: a step in plain Lightning that goes through the same parts in the order of 1F1B, written
by hand, shows how much of the cost that is. Exit status 1 where the step takes more than 1.10 of the time.

Memory that is freed is kept for the next allocation, as torch does on GPUs. By default glibc gives it back to the
system at moments that depend on sizes, and the page faults to get it again hit one of the Trainers or another.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import statistics
import sys
import time
import warnings

import pytorch_lightning
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autobalance
from autobalance.blocks import Blocks
from autobalance.execution.pipeline import Pipeline
from autobalance.placement.install import install
from autobalance.placement.locate import DeviceLocator
from examples.char_gpt import CONTEXT, LAYERS, CharGPT
from tests.benchmarks.in_turn import Runner, in_turn

LIMIT = 1.10
STAGES, MICRO_BATCHES, CHARACTERS = 4, 8, 96
HOST = torch.device("cpu")


_MALLOPT_TRIM_THRESHOLD, _MALLOPT_TOP_PAD, _MALLOPT_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc


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


class ByHand(pytorch_lightning.LightningModule):
    """The example's model, whose step goes through parts of its batch as a pipeline would, without one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = CharGPT(CHARACTERS)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer, in_flight = self.optimizers(), list[Tensor]()
        optimizer.zero_grad()
        losses = []
        for part in batch.chunk(MICRO_BATCHES):
            in_flight.append(self.model.loss(part) / MICRO_BATCHES)
            losses.append(in_flight[-1].detach())
            if len(in_flight) == STAGES:
                in_flight.pop(0).backward()
        for loss in in_flight:
            loss.backward()
        optimizer.step()
        self.log("loss", torch.stack(losses).sum(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.model.configure_optimizers()


def steps(turns: int, samples: int) -> list[list[float]]:
    """Seconds of each step of the example's model: of plain Lightning, by hand in parts, split over devices, in parts.

    Example:
        >>> plain, by_hand, whole, parts = steps(turns=50, samples=64)

    Args:
        turns: steps of each.
        samples: of a batch.
    """
    torch.manual_seed(0)
    batches = [torch.randint(CHARACTERS, (samples, CONTEXT + 1)) for _ in range(turns + 2)]
    names = ["embed", *(f"layers.{index}" for index in range(LAYERS)), "head"]
    pin = {name: index * STAGES // len(names) for index, name in enumerate(names)}
    whole = autobalance.SelfBalanceStrategy(pin=pin, schedule="naive")
    parts = autobalance.SelfBalanceStrategy(pin=pin, schedule="1f1b", micro_batches=MICRO_BATCHES)
    runners = [Runner("pytorch_lightning", model, batches, devices=1) for model in (CharGPT(CHARACTERS), ByHand())]
    runners += [
        Runner("pytorch_lightning", CharGPT(CHARACTERS), batches, devices=STAGES, strategy=strategy)
        for strategy in (whole, parts)
    ]
    return in_turn(runners, turns)


def keep_freed_memory() -> None:
    """Have glibc, where it is that, give no memory back to the system."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MALLOPT_TRIM_THRESHOLD, 2**30)
        mallopt(_MALLOPT_TOP_PAD, 2**25)
        mallopt(_MALLOPT_MMAP_THRESHOLD, 2**30)


def main() -> int:
    """Print both costs, and say whether a step in parts is within the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=60, help="steps of each Trainer (%(default)s)")
    parser.add_argument("--repeats", type=int, default=100, help="steps of blocks that do nothing (%(default)s)")
    parser.add_argument("--samples", type=int, default=64, help="of a batch (%(default)s; the example trains with 16)")
    options = parser.parse_args()
    keep_freed_memory()
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    console = Console()
    table = Table("stages", "micro-batches", "hand-over", "visit of a block", title="for each micro-batch and stage")
    for stages, count in ((2, 8), (4, 8), (4, 16), (8, 32)):
        cost, visit = handover(stages, count, options.repeats)
        table.add_row(str(stages), str(count), f"{1e6 * cost:.0f} µs", f"{1e6 * visit:.0f} µs")
    console.print(table)
    found = (statistics.median(seconds) for seconds in steps(options.turns, options.samples))
    plain, by_hand, whole, parts = found
    console.print(f"{options.samples} samples, plain Lightning: {1000 * plain:.1f} ms, median of {options.turns} steps")
    console.print(f"{MICRO_BATCHES} parts one after another, by hand: {by_hand / plain:.3f} of that")
    console.print(f"whole batches on {STAGES} devices: {whole / plain:.3f} of that")
    console.print(f"{MICRO_BATCHES} micro-batches on {STAGES} devices: {parts / plain:.3f}, at most {LIMIT}")
    return 0 if parts / plain <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
