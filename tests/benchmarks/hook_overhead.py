"""What the hooks cost: four logical CPU devices with every hook installed against plain Lightning, as a ratio.

Run it by hand: `python -m tests.benchmarks.hook_overhead`. Both Trainers run in one process, step by step in turn and
in alternating order, so that whatever else the machine does falls on both; the figure is the median over the pairs.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings

import lightning.pytorch as lightning
import torch
from torch import Tensor, nn

import autobalance  # noqa: F401  # registers the strategy
from tests.benchmarks.in_turn import Runner, in_turn

WIDTH, LAYERS, BATCH, TIME = 512, 4, 2, 32
WARM, LIMIT = 2, 1.02


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

    def on_train_start(self) -> None:
        self.hooked = sum(bool(part._forward_pre_hooks) for part in self.modules())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def measure(pairs: int, steps: int) -> tuple[list[float], float]:
    """Ratios of the step times, one per pair, and the median of plain Lightning's in seconds."""
    torch.manual_seed(0)
    batches = [torch.randn(BATCH, TIME, WIDTH)] * ((pairs + WARM) * steps)
    plain = Runner("lightning.pytorch", Transformer(), batches, steps, devices=1)
    hooked = Runner("lightning.pytorch", Transformer(), batches, steps, devices=4, strategy="self_balance")
    times = in_turn([plain, hooked], pairs, WARM)
    assert [runner.module.hooked for runner in (plain, hooked)] == [0, LAYERS + 2], "all blocks' doors are installed"
    return [with_hooks / without for without, with_hooks in zip(*times, strict=True)], statistics.median(times[0])


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
