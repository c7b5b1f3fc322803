from __future__ import annotations

import pytest
import torch

from autobalance.devices import detect
from autobalance.devices.detect import detect_devices
from autobalance.devices.kinds import kinds_of
from autobalance.devices.links import link_between, link_matrix
from autobalance.devices.words import parse_devices
from autobalance.measuring.calibration import Calibration, Identity

GIB = 2**30


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says it has two A100, the second with 30 GiB held by others and 5 GiB in our own cache."""
    free, reserved, allocated = {0: 78 * GIB, 1: 43 * GIB}, {0: 0, 1: 6 * GIB}, {0: 0, 1: 1 * GIB}
    made = []
    monkeypatch.setattr(torch, "empty", lambda *size, device: made.append(device))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def mem_get_info(index: int) -> tuple[int, int]:
        assert f"cuda:{index}" in made, "free memory is read before the context exists"
        return free[index], 80 * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: reserved[index])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: allocated[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(detect, "known_calibration", lambda device: None)


def test_own_cache_counts_as_free_and_what_others_hold_as_used(two_gpus: None) -> None:
    first, second = detect_devices()
    assert (first.name, first.capacity) == ("cuda:0", 78 * GIB)
    assert (second.name, second.capacity) == ("cuda:1", 48 * GIB)
    assert first.real
    assert (first.kind, first.bandwidth, first.rate("bfloat16"), first.host_link) == ("A100-80GB", 2039e9, 312e12, 32e9)
    assert link_between(first, second) == 300e9  # NVLink


def test_devices_are_taken_in_the_asked_order(two_gpus: None) -> None:
    assert [device.name for device in detect_devices([1, 0])] == ["cuda:1", "cuda:0"]
    with pytest.raises(ValueError, match=r"CUDA devices \[2\] do not exist: this machine shows 2"):
        detect_devices([0, 2])


def test_an_unknown_card_is_said_once_in_words(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some Card")
    with pytest.warns(UserWarning, match="cuda:0 is a Some Card, whose speed autobalance does not know"):
        (device,) = detect_devices([0])
    assert device.capacity == 78 * GIB


def test_a_calibrated_card_is_as_fast_as_it_was_measured(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Calibration(
        Identity("any", "1", "2", "3"),
        flops={"float32": 1.5e13, "bfloat16": 2.5e14},
        bandwidth=1.7e12,
        launch_time=7e-6,
        links={"0>1": 9e10, "1>0": 8e10},
        efficiency={"Linear": 0.8},
    )
    monkeypatch.setattr(detect, "known_calibration", lambda device: measured)
    first, second = detect_devices()
    assert (first.flops, first.bandwidth, first.link, first.launch_time) == (1.5e13, 1.7e12, 8e10, 7e-6)
    assert (first.rate("float32"), first.rate("bfloat16"), first.rate("tf32")) == (1.5e13, 2.5e14, 156e12)
    assert first.efficiency == (("Linear", 0.8),)
    assert link_between(first, second) == 8e10  # the slower of both ways


def test_measured_links_that_differ_belong_to_their_pair(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    links = {"0>1": 9e10, "1>0": 9.1e10, "0>2": 2e10, "2>0": 2.1e10, "1>2": 2e10, "2>1": 2e10}
    measured = Calibration(Identity("any", "1", "2", "3"), flops={"float32": 1.5e13}, bandwidth=1.7e12, links=links)
    monkeypatch.setattr(detect, "known_calibration", lambda device: measured)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (78 * GIB, 80 * GIB))
    for held in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, held, lambda index: 0)
    devices = detect_devices()
    assert link_matrix(devices)[[0, 0, 1], [1, 2, 2]].tolist() == [9e10, 2e10, 2e10]
    assert kinds_of(devices, [1, 1, 1]) == ((0, 1), (2,))  # 5 % between two measurements are noise


def test_without_peer_access_a_tensor_goes_through_the_host(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    first, second = detect_devices()
    assert not first.has_peers
    assert link_between(first, second) == 16e9  # half of PCI Express 4.0: to the host and on


def test_without_a_gpu_the_error_says_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"no CUDA GPU; say which devices to plan for, such as devices='4x80GiB'"
    ) as told:
        parse_devices(None)
    assert "--devices 4x80GiB on the command line" in str(told.value)


@pytest.mark.cuda
def test_a_real_gpu_has_less_free_than_its_total() -> None:
    device = detect_devices([0])[0]
    assert 0 < device.capacity < torch.cuda.mem_get_info(0)[1]
    assert device.real
