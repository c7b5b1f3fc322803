"""Tests of this room run on simulated devices unless they say otherwise, with one of the two Lightning packages each.

Which one is drawn by the name of the test, so that either sees half of them. The packages are the same code under two
names: what of ours depends on the name is tested with both, under the mark `both_packages`.
"""

from __future__ import annotations

import gc
import importlib
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from zlib import crc32

import pytest

import autobalance

PACKAGES = ("pytorch_lightning", "lightning.pytorch")

# What Lightning says about the tiny loaders, the silent Trainers and the short epochs of these tests.
EXPECTED_WARNINGS = (
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*number of training batches .* is smaller than the logging interval:UserWarning",
    "ignore:.*exists and is not empty:UserWarning",
    "ignore:You called `self.log.*but have no logger configured:UserWarning",
    "ignore:.*isinstance.treespec, LeafSpec.* is deprecated:FutureWarning",
    "ignore:Trying to infer the `batch_size` from an ambiguous collection:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "strategy":
            for warning in EXPECTED_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "both_packages: runs with either Lightning package, not with one of them")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    definition = metafunc.definition
    chosen = any("lightning" in mark.args[0] for mark in definition.iter_markers("parametrize"))
    if "lightning" in metafunc.fixturenames and not chosen:
        drawn = PACKAGES[crc32(definition.name.encode()) % 2]
        both = definition.get_closest_marker("both_packages") is not None
        metafunc.parametrize("lightning", PACKAGES if both else [drawn], indirect=True)


@pytest.fixture(scope="session")
def packages() -> None:
    """Load both Lightning packages and torchmetrics, and leave their many objects out of garbage collections."""
    for package in (*PACKAGES, "torchmetrics"):
        importlib.import_module(package)
    from autobalance.strategy.registration import register_imported

    register_imported()
    gc.collect()
    gc.freeze()


@pytest.fixture
def lightning(request: pytest.FixtureRequest, packages: None) -> ModuleType:
    """A Lightning package; the other is loaded as well."""
    module: ModuleType = importlib.import_module(request.param)
    return module


@pytest.fixture
def simulated(packages: None) -> Iterator[None]:
    """Four simulated devices without a memory limit."""
    gc.collect()
    with autobalance.simulate(4):
        yield
    gc.collect()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep Lightning's information out of test reports."""
    loggers = [logging.getLogger(package) for package in PACKAGES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def trainer(lightning: ModuleType) -> Callable[..., Any]:
    """Makes Trainers that say and write little: four simulated devices, one epoch."""

    def make(**options: Any) -> Any:
        defaults = {
            "accelerator": "simulated",
            "devices": 4,
            "strategy": "self_balance",
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        return lightning.Trainer(**{**defaults, **options})

    return make


@pytest.fixture
def messages(lightning: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said through Lightning's logger."""
    said: list[str] = []
    rank_zero = importlib.import_module(f"{lightning.__name__}.utilities.rank_zero")
    monkeypatch.setattr(rank_zero, "rank_zero_info", lambda message, *rest, **options: said.append(str(message)))
    return said
