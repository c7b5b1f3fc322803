from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autobalance import Plan, Profile

MIB = 2**20
Run = Callable[..., str]

MODULE = """
import torch
from torch import nn
from lightning.pytorch import LightningModule

class Net(LightningModule):
    def configure_model(self):
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 8)

    def training_step(self, batch, index):
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self.b(self.a(x)), y)}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
"""


def test_plan_prints_and_saves_the_best_split(profile: Path, tmp_path: Path, run: Run) -> None:
    text = run("plan", profile, "2x15MiB", "-o", tmp_path / "plan.json")
    assert "4 blocks on 2 devices, policy auto" in text
    assert "12.00" in text
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.assignment == (0, 1, 1, 1)
    assert plan.peaks == (12 * MIB, 12 * MIB)


def test_plan_takes_policy_limits_and_pins(profile: Path, tmp_path: Path, run: Run) -> None:
    saved = tmp_path / "plan.json"
    run("plan", profile, "--devices", "2x30MiB", "--policy", "sequential", "-o", saved)
    assert Plan.load(saved).assignment == (0, 0, 0, 0)
    # 16 of 30 and 8 of 20 MiB: all other ways use 60 % or more of some device.
    run("plan", profile, "2x30MiB", "--policy", "balanced", "--max-memory", "0=20MiB", "-o", saved)
    assert Plan.load(saved).assignment == (1, 1, 0, 0)
    run("plan", profile, "2x30MiB", "--pin", "layers.1=0", "--pin", "head=1", "-o", saved)
    assert Plan.load(saved).assignment[2:] == (0, 1)
    run("plan", profile, "2x40MiB", "--reserve", "0.25", "-o", saved)
    assert Plan.load(saved).budgets == (30 * MIB,) * 2
    run("plan", profile, "2x40MiB", "--reserve", "1MiB", "-o", saved)
    assert Plan.load(saved).budgets == (39 * MIB,) * 2


def test_plan_takes_schedule_and_micro_batches(tmp_path: Path, run: Run) -> None:
    path, saved = tmp_path / "profile.json", tmp_path / "plan.json"
    Profile.from_costs(static=[4, 4], saved=[8, 8], forward_time=[1, 1], batch_size=4).save(path)
    run("plan", path, "2x1MiB", "--schedule", "1f1b", "--micro-batches", "4", "-o", saved)
    assert (Plan.load(saved).schedule, Plan.load(saved).micro_batches) == ("1f1b", 4)


def test_plan_that_does_not_fit_says_why_and_fails(profile: Path, run: Run) -> None:
    message = run("plan", profile, "2x11MiB", status=1)
    assert message.startswith("autobalance plan: ")
    assert "1.00 MiB" in message


def test_plan_tells_the_largest_batch_of_every_policy(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "profile.json"
    Profile.from_costs(static=[10 * MIB] * 4, saved=[3 * MIB] * 4, batch_size=1).save(path)
    # Two blocks on each device, 20 + 6 b <= 50; filled in order, 30 + 9 b <= 50 holds for fewer samples.
    text = run("plan", path, "2x50MiB", "--max-batch", "--recompute", "no")
    assert "largest batch that fits, in samples: auto 5, balanced 5, balanced_low_0 5, sequential 5" in text
    text = run("plan", path, "2x22MiB", "--max-batch")
    assert "auto none, balanced none" in text


def test_plan_is_drawn(profile: Path, tmp_path: Path, run: Run) -> None:
    assert "Drawn in " in run("plan", profile, "2x15MiB", "--report", tmp_path / "plan.html")
    assert "layers.0" in (tmp_path / "plan.html").read_text()


@pytest.mark.usefixtures("factory")
def test_plan_profiles_a_factory_for_the_batch_that_is_asked_for(tmp_path: Path, run: Run) -> None:
    saved = tmp_path / "plan.json"
    run("plan", "factory.py:make", "--devices", "2xV100-16GB", "--batch", "32", "-o", saved, "--micro-batches", 1)
    plan = Plan.load(saved)
    assert plan.block_names == ("0+1", "2", "3")
    assert "batch=float32[32,64]; step=training; optimizer=AdamW; precision=32-true" in plan.fingerprint
    run(
        "plan",
        "factory.py:forgets_the_batch",
        "2x1GiB",
        "--batch",
        "float32[6,64]",
        "--inference",
        "-o",
        saved,
        "--schedule",
        "naive",
    )
    assert "batch=float32[6,64]; step=inference; optimizer=none" in Plan.load(saved).fingerprint
    run("plan", "factory.py:make", "2x1GiB", "--batch", "factory.py:batch", "--optimizer", "SGD", "-o", saved)
    assert "batch=float32[6,64]; step=training; optimizer=SGD" in Plan.load(saved).fingerprint


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_plan_runs_the_own_step_and_optimizer_of_a_lightning_module(tmp_path: Path, run: Run) -> None:
    Path("net.py").write_text(MODULE)
    saved = tmp_path / "plan.json"
    run("plan", "net.py:Net", "2x1GiB", "--batch", "float32[4,64] int64[4]", "-o", saved)
    plan = Plan.load(saved)
    assert "optimizer=SGD" in plan.fingerprint
    # The momentum of SGD takes as much as the weights.
    assert all(block.optimizer == block.weights for block in plan.blocks)
    assert plan.block_names == ("a", "b")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_plan_makes_an_adamw_as_the_lightning_module_does(tmp_path: Path, run: Run) -> None:
    Path("net.py").write_text(
        MODULE.replace("SGD(self.parameters(), lr=0.1, momentum=0.9)", "AdamW(self.parameters())")
    )
    saved = tmp_path / "plan.json"
    run("plan", "net.py:Net", "2x1GiB", "--batch", "float32[4,64] int64[4]", "-o", saved)
    assert "optimizer=AdamW" in Plan.load(saved).fingerprint
