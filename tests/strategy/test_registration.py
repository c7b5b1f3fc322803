"""Every way in which `strategy="self_balance"` becomes known, each in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("pytorch_lightning", "lightning.pytorch")
OTHER = {"pytorch_lightning": "lightning", "lightning.pytorch": "pytorch_lightning"}

# The model of the seed: nothing but a `self_balance` method tells it from any other.
MODEL = """
import sys, warnings, logging
import torch
from torch import nn
from torch.utils.data import DataLoader

class {name}({bases}):
    def __init__(self):
        super().__init__()
        self.model_a = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
        self.layer_1 = nn.Linear(8, 8)
        self.layer_2 = nn.Linear(8, 2)

    def self_balance(self):
        return [self.model_a, self.layer_1, self.layer_2]

    def training_step(self, batch, batch_idx):
        assert self.model_a[0].weight.device == torch.device("simulated", 0), self.model_a[0].weight.device
        return self.layer_2(torch.relu(self.layer_1(self.model_a(batch)))).pow(2).mean()

    def train_dataloader(self):
        return DataLoader(torch.randn(8, 4), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

QUIET = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
WHERE = dict(accelerator="simulated", devices=3, max_epochs=1)

def fit(trainer, model=None):
    model = model or {name}()
    trainer.fit(model)
    assert trainer.strategy.plan.assignment == (0, 1, 2), trainer.strategy.plan
    return trainer
"""

WITH_MIXIN = MODEL.format(name="Net", bases="SelfBalance, LightningModule")
WITHOUT_MIXIN = MODEL.format(name="Net", bases="LightningModule")


def run(code: str, folder: Path, *arguments: str, **environment: str) -> str:
    """Run a script; its warnings are shown, not errors, since a new interpreter has Lightning's own."""
    script = folder / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "AUTOBALANCE_SIMULATE": "3x1MiB", **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("package", PACKAGES[:1])  # an interpreter takes seconds: each package has some
def test_a_module_without_the_mixin_trains_after_the_import(package: str, tmp_path: Path) -> None:
    code = f"""
import os, sys
from {package} import LightningModule, Trainer
import autobalance
assert "{OTHER[package]}" not in sys.modules
{WITHOUT_MIXIN}
fit(Trainer(strategy="self_balance", **WHERE, **QUIET))
fit(Trainer(strategy=autobalance.SelfBalanceStrategy(policy="balanced"), **WHERE, **QUIET))
assert isinstance(fit(Trainer(strategy="self_balance", **WHERE, **QUIET)).strategy, autobalance.SelfBalanceStrategy)
os.environ["PL_TRAINER_STRATEGY"] = "self_balance"
assert isinstance(fit(Trainer(**WHERE, **QUIET)).strategy, autobalance.SelfBalanceStrategy)
"""
    run(code, tmp_path)


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_a_module_without_the_mixin_trains_where_lightning_is_imported_last(package: str, tmp_path: Path) -> None:
    code = f"""
import sys
import autobalance
from {package} import LightningModule, Trainer
assert "{OTHER[package]}" not in sys.modules
assert "{package}" not in [getattr(finder, "root", None) for finder in sys.meta_path]
root = sys.modules["{package}"]
assert root.__loader__ is root.__spec__.loader and type(root.__loader__).__module__.startswith(("_frozen", "importlib"))
{WITHOUT_MIXIN}
fit(Trainer(strategy="self_balance", **WHERE, **QUIET))
"""
    run(code, tmp_path)


def test_two_packages_imported_after_autobalance_and_run_again_know_the_name(tmp_path: Path) -> None:
    first = "from pytorch_lightning import LightningModule, Trainer"
    second = "from lightning.pytorch import LightningModule, Trainer"
    fits = f"""
{WITHOUT_MIXIN}
fit(Trainer(strategy="self_balance", **WHERE, **QUIET))
"""
    code = f"""
import importlib, sys
import autobalance
ours = lambda: [finder for finder in sys.meta_path if "autobalance" in type(finder).__module__]
assert len(ours()) == 2
{first}{fits}
{second}{fits}
assert not ours(), sys.meta_path
for name in ("lightning.pytorch", "pytorch_lightning", "autobalance"):
    importlib.reload(sys.modules[name])
assert not ours(), sys.meta_path
{second}{fits}
{first}{fits}
"""
    run(code, tmp_path)


def test_both_packages_work_in_one_process(tmp_path: Path) -> None:
    code = f"""
import pytorch_lightning, lightning.pytorch
import autobalance
from autobalance import SelfBalance
from pytorch_lightning import LightningModule
{WITH_MIXIN}
First = Net
from lightning.pytorch import LightningModule
{MODEL.format(name="Second", bases="SelfBalance, LightningModule")}
class Mine(autobalance.SelfBalanceStrategy):
    def setup(self, trainer):
        self.is_set_up = True
        super().setup(trainer)
for package, model in ((pytorch_lightning, First), (lightning.pytorch, Second)):
    by_name = fit(package.Trainer(strategy="self_balance", **WHERE, **QUIET), model())
    by_class = fit(package.Trainer(strategy=autobalance.SelfBalanceStrategy(), **WHERE, **QUIET), model())
    by_subclass = fit(package.Trainer(strategy=Mine(), **WHERE, **QUIET), model())
    assert by_subclass.strategy.is_set_up
    for trainer in (by_name, by_class, by_subclass):
        assert isinstance(trainer.strategy, autobalance.SelfBalanceStrategy), type(trainer.strategy).__mro__
        assert isinstance(trainer.strategy, package.strategies.ParallelStrategy)
"""
    run(code, tmp_path)


CLI = """
from {package}.cli import LightningCLI
cli = LightningCLI(
    Net,
    save_config_callback=None,
    trainer_defaults=dict(WHERE, **QUIET),
    seed_everything_default=1,
    parser_kwargs=dict(default_env=True),
)
strategy = cli.trainer.strategy
print("ran with", type(strategy).__name__, strategy.options, strategy.plan.assignment)
"""


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_the_mixin_registers_for_trainers_and_for_the_command_line(package: str, tmp_path: Path) -> None:
    """The strategy is a name, then on the command line a name, a class in a file, and a variable of the environment."""
    by_file = tmp_path / "config.yaml"
    by_file.write_text(
        "trainer:\n  strategy:\n    class_path: autobalance.SelfBalanceStrategy\n"
        "    init_args:\n      policy: balanced\n      max_memory: {0: 1MiB}\n      pin: {layer_2: 2}\n"
    )
    code = f"""
import os
from autobalance import SelfBalance
from {package} import LightningModule, Trainer
{WITH_MIXIN}
fit(Trainer(strategy="self_balance", **WHERE, **QUIET))
assert "{OTHER[package]}" not in sys.modules
for arguments in (["--trainer.strategy=self_balance"], ["--config=config.yaml"], []):
    if not arguments:
        os.environ["PL_FIT__TRAINER__STRATEGY"] = "self_balance"
    sys.argv[1:] = ["fit", *arguments]
    exec({CLI.format(package=package)!r})
"""
    said = run(code, tmp_path)
    assert "3 simulated devices" in said
    name, file, variable = (line for line in said.splitlines() if line.startswith("ran with"))
    assert "SelfBalanceStrategy" in name
    assert "(0, 1, 2)" in name
    assert variable == name
    assert "policy='balanced', max_memory={0: '1MiB'}, reserve='auto', pin={'layer_2': 2}" in file


def test_registering_again_changes_nothing() -> None:
    import pytorch_lightning

    from autobalance.strategy.registration import register

    register("pytorch_lightning")
    before = pytorch_lightning.strategies.StrategyRegistry["self_balance"]
    register("pytorch_lightning")
    assert pytorch_lightning.strategies.StrategyRegistry["self_balance"] is before
