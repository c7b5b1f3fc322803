"""Predicted peaks against what one GPU shows, and how that comparison is judged where there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.benchmarks import cuda_peaks


def test_bars_are_two_per_cent_of_allocated_and_four_of_reserved_bytes() -> None:
    assert cuda_peaks.within((1020, 1040), (1000, 1000))
    assert not cuda_peaks.within((1021, 1000), (1000, 1000))
    assert not cuda_peaks.within((1000, 959), (1000, 1000))


def test_peak_of_a_perceptron_is_that_of_a_hand_calculation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, two moments, gradients, a foreach temporary, the workspaces of two threads, batch and loss."""
    monkeypatch.setitem(cuda_peaks.MODELS, "small", cuda_peaks.Model(_Layer, _batch, _loss))
    allocated, reserved = cuda_peaks.predict("small", "A100-80GB")
    parameters = 5 * (1024 * 1024 * 4 + 1024 * 4)
    workspaces = 2 * (8 * 2**20 + 2**17)
    assert allocated == parameters + workspaces + 64 * 1024 * 4 + 512
    assert allocated <= reserved <= allocated + 40 * 2**20


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1024, 1024)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(inputs)
        return result


def _batch() -> dict[str, torch.Tensor]:
    return {"inputs": torch.zeros(64, 1024)}


def _loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = model(batch["inputs"]).mean()
    return result


@pytest.mark.cuda
@pytest.mark.parametrize("name", [*cuda_peaks.MODELS])
def test_peak_is_what_the_gpu_shows(name: str) -> None:
    command = [sys.executable, cuda_peaks.__file__, "--models", name]
    table = subprocess.run(command, capture_output=True, text=True, check=False)
    assert table.returncode == 0, table.stdout + table.stderr
