from __future__ import annotations

import json
import re
import sys
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
"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Four blocks of 12, 4, 4 and 4 MiB; the first has small weights and keeps much for the backward pass."""
    path = tmp_path / "profile.json"
    costs = {"static": [1 * MIB, 4 * MIB, 4 * MIB, 4 * MIB], "saved": [11 * MIB, 0, 0, 0]}
    autobalance.Profile.from_costs(**costs, names=["embed", "layers.0", "layers.1", "head"]).save(path)
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    """What a command prints: its output, or its message where it fails."""
    assert main([str(word) for word in words]) == status
    printed = capsys.readouterr()
    return printed.err if status else printed.out


def test_plan_prints_and_saves_the_best_split(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(capsys, "plan", profile, "2x15MiB", "-o", tmp_path / "plan.json")
    assert "4 blocks on 2 devices, policy balanced" in text
    assert "12.00" in text
    plan = autobalance.Plan.load(tmp_path / "plan.json")
    assert plan.assignment == (0, 1, 1, 1)
    assert plan.peaks == (12 * MIB, 12 * MIB)


def test_plan_takes_policy_limits_and_pins(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "plan.json"
    run(capsys, "plan", profile, "2x30MiB", "--policy", "sequential", "-o", saved)
    assert autobalance.Plan.load(saved).assignment == (0, 0, 0, 0)
    run(capsys, "plan", profile, "2x30MiB", "--max-memory", "1=5MiB", "-o", saved)
    assert autobalance.Plan.load(saved).assignment == (0, 0, 0, 1)
    run(capsys, "plan", profile, "2x30MiB", "--pin", "layers.1=0", "--pin", "head=1", "-o", saved)
    assert autobalance.Plan.load(saved).assignment[2:] == (0, 1)
    run(capsys, "plan", profile, "2x40MiB", "--reserve", "0.25", "-o", saved)
    assert autobalance.Plan.load(saved).budgets == (30 * 2**20,) * 2
    run(capsys, "plan", profile, "2x40MiB", "--reserve", "1MiB", "-o", saved)
    assert autobalance.Plan.load(saved).budgets == (39 * 2**20,) * 2


def test_plan_that_does_not_fit_says_why_and_fails(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = run(capsys, "plan", profile, "2x11MiB", status=1)
    assert message.startswith("autobalance plan: ")
    assert "1.00 MiB" in message


def test_compare_judges_all_splits_by_one_replay(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand = tmp_path / "by_hand.json"
    by_hand.write_text(json.dumps({"embed": "cuda:1", "layers": 0, "head": 1}))
    saved = tmp_path / "saved.json"
    run(capsys, "plan", profile, "2x40MiB", "--policy", "sequential", "-o", saved)
    text = run(capsys, "compare", profile, "2x15MiB", "--map", by_hand, "--map", saved)
    rows = [re.split(r"  +", line.strip())[:5] for line in text.splitlines() if "%" in line]
    assert {name: cells for name, *cells in rows if name != "accelerate"} == {
        "autobalance": ["12.00", "12.00", "80.0%", "yes"],
        "even by layers": ["16.00", "8.00", "106.7%", "no"],
        "even by weights": ["16.00", "8.00", "106.7%", "no"],
        "by_hand.json": ["8.00", "16.00", "106.7%", "no"],
        "saved.json": ["24.00", "0.00", "160.0%", "no"],
    }


def test_compare_without_a_plan_that_fits_shows_the_others(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "compare", profile, "2x11MiB")
    assert "even by weights" in text
    assert "autobalance has no plan: " in text


def test_profile_measures_what_a_function_of_a_file_returns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("factory.py").write_text(FACTORY)
    saved = tmp_path / "profile.json"
    text = run(capsys, "profile", "factory.py:make", "-o", saved)
    assert "peak if all sat on one device" in text
    measured = autobalance.Profile.load(saved)
    assert measured.names == ("0+1", "2", "3")
    weights = 64 * 64 * 4 + 512  # memory comes in pieces of 512 bytes, of which the bias fills half of one
    assert measured.blocks[1].weights == weights
    assert measured.blocks[1].optimizer >= 2 * weights


def test_profile_takes_target_accumulation_clipping_and_batches_of_any_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("factory.py").write_text(FACTORY)
    saved = tmp_path / "profile.json"
    options = ["--target", "V100-16GB", "--accumulate", "2", "--clip", "1.0", "--scalable", "-o", saved]
    text = run(capsys, "profile", "factory.py:make", *options)
    assert "kernels of V100-16GB" in text
    assert "exact" in text
    made = autobalance.Profile.load(saved)
    assert made.target == "V100-16GB"
    assert made.peak(batch_size=1000) > made.peak(batch_size=1)
    assert [name for name, _ in made.timeline.marks].count("step 2 forward") == 2


def test_profile_measures_on_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("factory.py").write_text(FACTORY)
    with autobalance.simulate(1):
        text = run(capsys, "profile", "factory.py:make", "--measure", "simulated:0")
    assert "kernels of simulated" in text


def test_profile_finds_a_module_in_this_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("in_this_folder.py").write_text(FACTORY)
    assert "3 blocks, batch: train batch" in run(capsys, "profile", "in_this_folder:make", "--optimizer", "none")


def test_profile_of_inference_holds_no_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("factory.py").write_text(FACTORY)
    run(capsys, "profile", "factory.py:make", "--inference", "-o", tmp_path / "profile.json")
    measured = autobalance.Profile.load(tmp_path / "profile.json")
    assert not measured.training
    assert all(block.gradients == block.optimizer == 0 for block in measured.blocks)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["profile", "missing.py:make"], "autobalance profile: there is no file missing.py"),
        (["profile", "factory.py"], "autobalance profile: 'factory.py' names no function: write FILE.py:FUNCTION"),
        (["profile", "factory.py:build"], "autobalance profile: factory has no 'build' that can be called"),
        (
            ["profile", "factory.py:forgets_the_batch"],
            'factory.py:forgets_the_batch returned no batch: have it return (model, batch), or say --batch "x=',
        ),
        (["profile", "factory.py:make", "--optimizer", "Adan"], "torch.optim has no 'Adan' that can be called"),
        (["plan", "missing.json", "2x1GiB"], "missing.json"),
        (["profile", "no_such_module:make"], "autobalance profile: No module named 'no_such_module'"),
    ],
)
def test_bad_input_is_told_without_a_traceback(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("factory.py").write_text(FACTORY)
    assert message in run(capsys, *words, status=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "p.json", "--max-memory", "10GiB"], "'10GiB' is not DEVICE=SIZE, such as 0=10GiB"),
        (["plan", "p.json", "--pin", "head"], "'head' is not BLOCK=DEVICE, such as head=0"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_usage_is_told_by_the_parser(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"autobalance {autobalance.__version__}\n"


def test_calibrate_measures_and_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOBALANCE_CACHE", str(tmp_path / "cache"))
    with autobalance.simulate(1):
        text = run(capsys, "calibrate", "simulated:0")
    assert "simulated" in text
    assert "GB/s" in text
    assert list((tmp_path / "cache").glob("calibration-*.json"))
