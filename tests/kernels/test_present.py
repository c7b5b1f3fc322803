from __future__ import annotations

import pytest
import torch

import autobalance
from autobalance.kernels.present import target_of
from autobalance.simulated import backend


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is what this machine then stands for")
def test_without_a_gpu_simulated_devices_count_where_some_are_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "device_count", lambda: 0)
    assert target_of(None).name == "A100-80GB"
    monkeypatch.undo()
    with autobalance.simulate("2x1GiB"):
        assert target_of(None).kind == "simulated"
        assert target_of("cpu").kind == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused_by_its_number() -> None:
    with pytest.raises(ValueError, match="target='cuda:1' is no GPU of this machine; name a kind of GPU instead"):
        target_of("cuda:1")


@pytest.mark.cuda
def test_the_gpu_that_is_there_counts() -> None:
    assert target_of(None).name == torch.cuda.get_device_name(0)
