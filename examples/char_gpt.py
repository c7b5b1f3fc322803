"""A GPT that fits on none of four devices learns to write Python, character by character.

    autobalance demo                          # runs this file
    python examples/char_gpt.py --steps 100   # so does this, for fewer steps

It reads the sources of Python's own standard library. It trains on this machine's GPUs if there are two, else on
simulated devices.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from pytorch_lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

import autobalance

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 128, 4, 6, 64, 16
SIMULATED = "4x28MiB"  # training needs 75 MiB


class Embedding(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))

    def forward(self, text: Tensor) -> Tensor:
        return self.character(text) + self.position


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def attention(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.queries_keys_values(x).chunk(3, -1))
        return self.mix(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class CharGPT(autobalance.SelfBalance, LightningModule):
    """Nothing here knows about devices but `self_balance`, which says what may be placed."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed = Embedding(characters)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))

    def self_balance(self) -> list[nn.Module]:
        return [self.embed, *self.layers, self.head]

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("held_out_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def read_standard_library() -> tuple[Tensor, int]:
    """The sources as numbers of characters, and how many different characters there are."""
    sources = [path.read_text("utf-8", "ignore") for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    codes = torch.tensor(list("".join(sources).encode("ascii", "ignore")))
    characters, text = codes.unique(return_inverse=True)
    return text, len(characters)


def unigram_entropy(text: Tensor) -> float:
    """Nats per character of the best model that knows only how often each character occurs."""
    return torch.special.entr(text.bincount() / len(text)).sum().item()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="autobalance demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    steps = parser.parse_args(arguments).steps
    if steps < 1:
        parser.error("--steps must be at least 1")
    warnings.filterwarnings("ignore", message=".*(many workers|logging interval|LeafSpec)")  # of no concern here

    kind = "cuda" if torch.cuda.device_count() >= 2 else "simulated"
    if kind == "simulated":
        print(f"Devices: {SIMULATED}, simulated on the CPU, since this machine has fewer than two GPUs.")
        autobalance.simulate(SIMULATED)
        torch.set_num_threads(1)  # for tensors this small, threads wait for each other, on a busy machine for long
    else:
        print(f"Devices: {torch.cuda.device_count()} GPUs, each of which could hold this small model alone.")
    devices = torch.get_device_module(kind)

    seed_everything(0, verbose=False)
    text, characters = read_standard_library()
    pieces = text.unfold(0, CONTEXT + 1, CONTEXT)  # the last character of each is the first of the next
    seen, held_out = pieces[: len(pieces) * 9 // 10], pieces[len(pieces) * 9 // 10 :]
    loaders = DataLoader(seen, BATCH, shuffle=True), DataLoader(held_out, BATCH)

    def trainer(**options: object) -> Trainer:
        limits = {"max_epochs": 1, "limit_train_batches": steps, "limit_val_batches": 20, "num_sanity_val_steps": 0}
        return Trainer(accelerator=kind, logger=False, enable_checkpointing=False, **limits, **options)

    lightning_log = logging.getLogger("pytorch_lightning")
    lightning_log.setLevel(logging.WARNING)
    if kind == "simulated":
        try:
            trainer(devices=1, enable_progress_bar=False, enable_model_summary=False).fit(CharGPT(characters), *loaders)
        except torch.OutOfMemoryError as error:
            print(f"\nOn one device:\n  torch.OutOfMemoryError: {error}\n")
        gc.collect()  # what that run still held

    balanced = trainer(strategy="self_balance", devices=devices.device_count())
    for index in range(devices.device_count()):
        devices.reset_peak_memory_stats(index)
    lightning_log.setLevel(logging.INFO)  # the plan is logged
    balanced.fit(CharGPT(characters), *loaders)

    print(f"\n{'device':<12} {'predicted peak':>20} {'reached peak':>20}")
    for index, predicted in enumerate(balanced.strategy.plan.peaks):
        print(f"{kind}:{index:<3} {predicted:>20,} B {devices.max_memory_allocated(index):>18,} B")
    loss = balanced.callback_metrics["held_out_loss"]
    print(f"\nUnigram entropy of the text: {unigram_entropy(text):.3f} nats per character")
    print(f"Loss after {steps} steps, on text held out: {loss:.3f} nats per character")


if __name__ == "__main__":
    main()
