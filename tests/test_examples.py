"""Every example runs, small, and shows what it says it shows."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `autobalance demo` prints, for three steps, on a machine that shows no GPU."""
    command = [sys.executable, "-m", "autobalance.cli", "demo", "--steps", "3"]
    folder = tmp_path_factory.mktemp("demo")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    return done.stdout + done.stderr


def test_the_demo_says_first_which_devices_it_uses(demo: str) -> None:
    assert demo.splitlines()[0].startswith("Devices: 4x28MiB, simulated on the CPU")


def test_the_demo_runs_out_of_memory_on_one_device(demo: str) -> None:
    error = demo.index("torch.OutOfMemoryError: ")
    assert error < demo.index("8 blocks on 4 devices")


def test_the_demo_reaches_the_peaks_it_predicts(demo: str) -> None:
    rows = re.findall(r"^simulated:(\d) +([\d,]+) B +([\d,]+) B$", demo, re.MULTILINE)
    assert [device for device, _, _ in rows] == ["0", "1", "2", "3"]
    assert all(predicted == reached for _, predicted, reached in rows), rows


def test_the_demo_prints_entropy_and_loss(demo: str) -> None:
    entropy, loss = map(float, re.findall(r": (\d\.\d+) nats per character", demo))
    assert 2.5 < entropy < math.log(96)
    assert loss < math.log(96)


def test_the_demo_needs_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("char_gpt").main(["--steps", "0"])
    assert "--steps must be at least 1" in capsys.readouterr().err


def test_unigram_entropy_is_that_of_the_frequencies() -> None:
    text = torch.tensor([0, 0, 0, 1, 3])
    by_hand = -(0.6 * math.log(0.6) + 2 * 0.2 * math.log(0.2))
    assert load("char_gpt").unigram_entropy(text) == pytest.approx(by_hand)


def test_the_model_of_the_demo_has_one_to_one_and_a_half_million_parameters() -> None:
    model = load("char_gpt").CharGPT(96)
    assert 1.0e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 1.5e6


def test_every_example_is_tested() -> None:
    assert [path.name for path in sorted(EXAMPLES.glob("*.py"))] == ["char_gpt.py"]
