"""What is measured on a device is kept for it, and nothing else is taken for it."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autobalance
from autobalance.measuring import probe
from autobalance.measuring.calibration import (
    Calibration,
    Identity,
    cache_directory,
    calibrate,
    known_calibration,
    read_calibration,
    write_calibration,
)

IDENTITY = Identity("NVIDIA A100-SXM4-80GB", "550.54.15", "2.13.0", "0.1.0")
CALIBRATION = Calibration(
    IDENTITY,
    context=450 * 2**20,
    workspaces=2**24,
    flops={"float32": 1.8e13, "bfloat16": 2.5e14},
    bandwidth=1.7e12,
    launch_time=4e-6,
    links={"0>1": 2.4e11},
    efficiency={"Layer": 0.5},
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("AUTOBALANCE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two simulated devices, measured with little work."""
    monkeypatch.setattr(probe, "LARGEST_MATRIX", 128)
    monkeypatch.setattr(probe, "LARGEST_COPY", 2**20)
    monkeypatch.setattr(probe, "LAUNCHES", 10)
    with autobalance.simulate(2):
        yield


def test_what_is_written_is_read_again(cache: Path) -> None:
    assert read_calibration(IDENTITY) is None
    write_calibration(CALIBRATION)
    assert read_calibration(IDENTITY) == CALIBRATION
    (path,) = cache.iterdir()
    assert path.name.startswith("calibration-nvidia-a100-sxm4-80gb-")


@pytest.mark.parametrize("what", ["name", "driver", "torch", "autobalance"])
def test_another_device_or_version_knows_nothing_of_it(what: str) -> None:
    write_calibration(CALIBRATION)
    assert read_calibration(replace(IDENTITY, **{what: "other"})) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\x00", "it is not JSON"),
        (b'{"schema": 1, "kind": "plan"}', "is not a calibration saved by autobalance"),
        (b'{"schema": 0, "kind": "calibration"}', "was saved by another version"),
        (b'{"schema": 1, "kind": "calibration", "identity": 3}', "is damaged, or was edited"),
    ],
)
def test_a_damaged_file_is_passed_over_with_a_word(cache: Path, content: bytes, words: str) -> None:
    write_calibration(CALIBRATION)
    (path,) = cache.iterdir()
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=f"the calibration of NVIDIA A100-SXM4-80GB is passed over: .*{words}"):
        assert read_calibration(IDENTITY) is None


def test_a_file_of_another_device_is_passed_over_with_a_word(cache: Path) -> None:
    write_calibration(CALIBRATION)
    (path,) = cache.iterdir()
    data = json.loads(path.read_text())
    data["identity"]["driver"] = "1"
    path.write_text(json.dumps(data))
    with pytest.warns(UserWarning, match="it is the calibration of another device"):
        assert read_calibration(IDENTITY) is None


def test_a_directory_that_cannot_be_written_to_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOBALANCE_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be kept: .* Set AUTOBALANCE_CACHE to a directory that can be written"):
        write_calibration(CALIBRATION)


def test_the_directory_is_the_users_own_cache_unless_said_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("AUTOBALANCE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "autobalance"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "autobalance"


@pytest.mark.usefixtures("quick")
def test_simulated_devices_are_measured_once_and_known_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_calibration("simulated:0") is None
    first, second = calibrate(["simulated:0", "simulated:1"])
    assert first == second
    assert (first.identity.name, first.identity.torch) == ("simulated", torch.__version__)
    assert (first.context, first.workspaces) == (0, 0)
    assert set(first.flops) == {"float32", "bfloat16"}
    assert set(first.links) == {"0>1", "1>0"}
    assert min(*first.flops.values(), *first.links.values(), first.bandwidth, first.launch_time) > 0
    assert known_calibration("simulated:1") == first
    measured: list[str] = []

    def counted(device: str, identity: Identity) -> Calibration:
        measured.append(device)
        return first

    monkeypatch.setattr(probe, "probe", counted)
    calibrate(["simulated:0", "simulated:1"])
    assert measured == []
    calibrate(["simulated:0", "simulated:1"], force=True)
    assert measured == ["simulated:0"]


@pytest.mark.usefixtures("quick")
def test_calibrating_leaves_nothing_behind() -> None:
    drawn = torch.get_rng_state()
    before = [torch.simulated.memory_allocated(index) for index in range(2)]
    calibrate(["simulated:0", "simulated:1"])
    assert [torch.simulated.memory_allocated(index) for index in range(2)] == before
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_device_that_is_not_there_is_named() -> None:
    with autobalance.simulate(1), pytest.raises(ValueError, match="simulated:3 is not there"):
        calibrate(["simulated:3"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_device_has_to_be_named() -> None:
    with pytest.raises(ValueError, match="this machine has no GPU to calibrate; name a device"):
        calibrate()


def test_context_is_what_another_process_takes_beside_what_it_has_reserved(tmp_path: Path) -> None:
    """A process that takes 1000 bytes, 300 of them for its allocator, for as long as it runs."""
    taken = tmp_path / "taken"
    program = (
        f"open({str(taken)!r}, 'w').close(); print(300, flush=True); input(); import os; os.remove({str(taken)!r})"
    )
    program = program.replace("input()", "__import__('sys').stdin.read()")
    found = probe.context_bytes(lambda: 5000 - (1000 if taken.exists() else 0), [sys.executable, "-c", program])
    assert found == 700
    assert not taken.exists()


def test_driver_is_asked_for_and_may_be_unknown() -> None:
    assert probe.driver_version([sys.executable, "-c", "print('550.54.15'); print('550.54.15')"]) == "550.54.15"
    assert probe.driver_version([sys.executable, "-c", "raise SystemExit(9)"]) == "unknown"
    assert probe.driver_version(["no-such-tool-anywhere"]) == "unknown"


@pytest.mark.cuda
def test_a_gpu_has_a_context_and_workspaces() -> None:
    before = torch.cuda.memory_allocated(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = calibrate(["cuda:0"])
    assert 50 * 2**20 < found.context < 4 * 2**30
    assert found.flops["bfloat16"] > found.flops["float32"] or os.environ.get("AUTOBALANCE_OLD_GPU")
    assert torch.cuda.memory_allocated(0) <= before
