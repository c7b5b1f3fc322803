"""What the hooks cost: four logical CPU devices with every hook installed against plain Lightning, as a ratio.

Run it by hand: `python tests/benchmarks/hook_overhead.py`. Both Trainers run in one process, step by step in turn and
in alternating order, so that whatever else the machine does falls on both; the figure is the median over the pairs.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import threading
import time
import warnings
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import autobalance  # noqa: F401  # registers the strategy

WIDTH, LAYERS, BATCH, TIME = 512, 4, 2, 32
LIMIT = 1.02


class Transformer(lightning.LightningModule):
    """Four encoder layers of width 512 between a linear embedding and a head, each of them a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def self_balance(self) -> list[nn.Module]:
        return [self.embed, *self.layers, self.head]

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = self.embed(batch)
        for layer in self.layers:
            x = layer(x)
        return (self.head(x) - batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Turns(lightning.Callback):
    """Lets two Trainers, each in a thread of its own, step in turn, and keeps the seconds of each step."""

    def __init__(self, mine: threading.Semaphore, done: threading.Semaphore, steps: int) -> None:
        self.seconds: list[float] = []
        self._mine, self._done, self._steps = mine, done, steps
        self._start = 0.0
        self.hooked = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.hooked = sum(bool(part._forward_pre_hooks) for part in module.modules())

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index % self._steps == 0:
            self._mine.acquire()
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        if (index + 1) % self._steps == 0:
            self._done.release()


class Runner:
    """One Trainer in a thread, which steps when it is told to."""

    def __init__(self, turns: int, steps: int, **options: Any) -> None:
        self._mine, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._steps = steps
        self.callback = Turns(self._mine, self._done, steps)
        self.trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[self.callback],
            **options,
        )
        torch.manual_seed(0)
        batches = [torch.randn(BATCH, TIME, WIDTH)] * (turns * steps)
        loader: DataLoader[Tensor] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset
        self._thread = threading.Thread(target=self.trainer.fit, args=(Transformer(), loader), daemon=True)
        self._thread.start()

    def turn(self) -> float:
        """Seconds per step of this Trainer's next steps."""
        self._mine.release()
        self._done.acquire()
        return statistics.fmean(self.callback.seconds[-self._steps :])

    def finish(self) -> None:
        """Wait for the end of the fit."""
        self._thread.join()


def measure(pairs: int, steps: int) -> tuple[list[float], float]:
    """Ratios of the step times, one per pair, and the median of plain Lightning's in seconds."""
    warm = 2
    plain = Runner(pairs + warm, steps, devices=1)
    hooked = Runner(pairs + warm, steps, devices=4, strategy="self_balance")
    ratios, seconds = [], []
    for pair in range(pairs + warm):
        order = (plain, hooked) if pair % 2 else (hooked, plain)
        times = {runner: runner.turn() for runner in order}
        if pair >= warm:
            ratios.append(times[hooked] / times[plain])
            seconds.append(times[plain])
    for runner in (plain, hooked):
        runner.finish()
    assert (plain.callback.hooked, hooked.callback.hooked) == (0, LAYERS + 2), "the doors of all blocks are installed"
    return ratios, statistics.median(seconds)


def main() -> None:
    """Print the median ratio, and fail if it is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1, help="steps per turn")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(2)
    ratios, seconds = measure(arguments.pairs, arguments.steps)
    lower, median, upper = statistics.quantiles(ratios, n=4)
    print(f"plain Lightning: {1000 * seconds:.1f} ms a step, median of {len(ratios)} pairs")
    print(f"hooked / plain:  {median:.4f} (quartiles {lower:.4f} to {upper:.4f}), at most {LIMIT}")
    if median > LIMIT:
        raise SystemExit(f"the hooks cost more than {LIMIT - 1:.0%} of a step")


if __name__ == "__main__":
    main()
