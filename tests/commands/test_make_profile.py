from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import autobalance

Run = Callable[..., str]
pytestmark = pytest.mark.usefixtures("factory")


def test_profile_measures_what_a_function_of_a_file_returns(tmp_path: Path, run: Run) -> None:
    saved = tmp_path / "profile.json"
    text = run("profile", "factory.py:make", "-o", saved)
    assert "peak if all sat on one device" in text
    measured = autobalance.Profile.load(saved)
    assert measured.names == ("0+1", "2", "3")
    weights = 64 * 64 * 4 + 512  # memory comes in pieces of 512 bytes, of which the bias fills half of one
    assert measured.blocks[1].weights == weights
    assert measured.blocks[1].optimizer >= 2 * weights


def test_profile_takes_target_accumulation_clipping_and_batches_of_any_size(tmp_path: Path, run: Run) -> None:
    saved = tmp_path / "profile.json"
    options = ["--target", "V100-16GB", "--accumulate", "2", "--clip", "1.0", "--scalable", "-o", saved]
    text = run("profile", "factory.py:make", *options)
    assert "kernels of V100-16GB" in text
    assert "exact" in text
    made = autobalance.Profile.load(saved)
    assert made.target == "V100-16GB"
    assert made.peak(batch_size=1000) > made.peak(batch_size=1)
    assert [name for name, _ in made.timeline.marks].count("step 2 forward") == 2


def test_profile_measures_on_a_device(run: Run) -> None:
    with autobalance.simulate(1):
        text = run("profile", "factory.py:make", "--measure", "simulated:0")
    assert "kernels of simulated" in text


def test_profile_finds_a_module_in_this_folder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("factory.py").rename("in_this_folder.py")
    assert "3 blocks, batch: train batch" in run("profile", "in_this_folder:make", "--optimizer", "none")


def test_profile_of_inference_holds_no_gradients(tmp_path: Path, run: Run) -> None:
    run("profile", "factory.py:make", "--inference", "-o", tmp_path / "profile.json")
    measured = autobalance.Profile.load(tmp_path / "profile.json")
    assert not measured.training
    assert all(block.gradients == block.optimizer == 0 for block in measured.blocks)
