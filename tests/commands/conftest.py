from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import autobalance
from autobalance.cli import main

MIB = 2**20

FACTORY = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8))
    return model, torch.randn(4, 64)

def forgets_the_batch():
    return make()[0]

def needs_numbers():
    assert torch.randn(3).sum().item() != 0
    return make()

def elsewhere():
    return nn.Linear(64, 8, device="cpu"), torch.zeros(2, 64)

def batch():
    return torch.zeros(6, 64)
"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Four blocks of 12, 4, 4 and 4 MiB; the first has small weights and keeps much for the backward pass."""
    path = tmp_path / "profile.json"
    costs = {"static": [1 * MIB, 4 * MIB, 4 * MIB, 4 * MIB], "saved": [11 * MIB, 0, 0, 0]}
    autobalance.Profile.from_costs(**costs, names=["embed", "layers.0", "layers.1", "head"]).save(path)
    return path


@pytest.fixture
def factory() -> None:
    """A file with functions that build models, in the present folder."""
    Path("factory.py").write_text(FACTORY)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command and returns what it prints: its output, or its message where it fails."""

    def run(*words: object, status: int = 0) -> str:
        assert main([str(word) for word in words]) == status
        printed = capsys.readouterr()
        return printed.err if status else printed.out

    return run
