from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import autobalance
from autobalance.cli import main

Run = Callable[..., str]


@pytest.mark.usefixtures("factory")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["profile", "missing.py:make"], "autobalance profile: there is no file missing.py"),
        (["profile", "factory.py"], "autobalance profile: 'factory.py' names no function: write FILE.py:FUNCTION"),
        (["plan", "factory.py"], "autobalance plan: 'factory.py' names no function: write FILE.py:FUNCTION"),
        (["profile", "factory.py:build"], "autobalance profile: factory has no 'build' that can be called"),
        (["profile", "factory.py:batch"], "factory.py:batch returned a Tensor; it must return a torch.nn.Module, or"),
        (
            ["profile", "factory.py:forgets_the_batch"],
            'factory.py:forgets_the_batch returned no batch: have it return (model, batch), or say --batch "x=',
        ),
        (["profile", "factory.py:make", "--optimizer", "Adan"], "torch.optim has no 'Adan' that can be called"),
        (["profile", "factory.py:make", "--dtype", "bf16"], "--dtype is about a transformers model, hf:NAME"),
        (["plan", "missing.json", "2x1GiB"], "missing.json"),
        (["plan", "missing.json", "--batch", "8"], "--batch says how a model is profiled, but missing.json is taken"),
        (["plan", "p.json", "2x1GiB", "--devices", "4x1GiB"], "devices are given twice: '2x1GiB' and --devices '4x1Gi"),
        (["profile", "no_such_module:make"], "autobalance profile: No module named 'no_such_module'"),
    ],
)
def test_bad_input_is_told_without_a_traceback(words: list[str], message: str, run: Run) -> None:
    assert message in run(*words, status=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "p.json", "--max-memory", "10GiB"], "'10GiB' is not DEVICE=SIZE, such as 0=10GiB"),
        (["plan", "p.json", "--pin", "head"], "'head' is not BLOCK=DEVICE, such as head=0"),
        (["plan", "p.json", "--micro-batches", "0"], "'0' is neither a number above 0 nor auto"),
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


def test_calibrate_measures_and_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("AUTOBALANCE_CACHE", str(tmp_path / "cache"))
    with autobalance.simulate(1):
        text = run("calibrate", "simulated:0")
    assert "simulated" in text
    assert "GB/s" in text
    assert list((tmp_path / "cache").glob("calibration-*.json"))
