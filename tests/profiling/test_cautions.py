"""What a profile says about blocks and GPUs that its tables do not know."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autobalance
from autobalance.kernels.attention import Attention, choose
from autobalance.kernels.target import find_target
from autobalance.kernels.workspaces import cublas_workspace

# torch's compiler, imported at its first use, warns about a part of torch itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")


def made() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Linear(64, 64))


@pytest.mark.parametrize("target", ["A100-80GB", "simulated", "cpu"])
def test_compiled_block_is_counted_as_written_and_said_to_be_unchecked(target: str) -> None:
    compiled = made()
    compiled[1].compile()
    profiles = [autobalance.profile(model, torch.zeros(8, 64), target=target) for model in (made(), compiled)]
    assert profiles[0].peak() == profiles[1].peak()
    assert profiles[0].notes == ()
    (told,) = profiles[1].notes
    assert "not checked: compiled (1)" in told


def test_wrapped_block_is_said_to_be_unchecked_too() -> None:
    model = made()
    model[1] = torch.compile(model[1])  # type: ignore[assignment] # torch's stubs promise a function
    profile = autobalance.profile(model, torch.zeros(8, 64), target="A100-80GB")
    assert profile.peak() == autobalance.profile(made(), torch.zeros(8, 64), target="A100-80GB").peak()
    assert "not checked: compiled (1)" in profile.notes[0]


def test_amd_gpus_are_unchecked_and_measuring_is_offered() -> None:
    profile = autobalance.profile(made(), torch.zeros(8, 64), target="hip")
    assert "not checked: hip takes the tables" in profile.notes[0]
    assert "pass measure=" in profile.notes[0]


def test_amd_gpus_have_no_cudnn_and_a_larger_workspace() -> None:
    hip = find_target("hip")
    half = torch.empty(2, 4, 8, 64, dtype=torch.bfloat16, device="meta")
    assert choose(Attention(half, half, half, None, 0.0, False, False, target=hip, release=(2, 14))) == "flash"
    assert cublas_workspace(hip, (2, 14), {}) == 32 * 2**20


def test_a_model_in_the_other_mode_is_told() -> None:
    model, rows = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 2)), torch.zeros(4, 8)
    assert autobalance.profile(model.train(), rows).notes == ()
    assert autobalance.profile(model.eval(), rows, training=False).notes == ()
    (told,) = autobalance.profile(model.eval(), rows).notes
    assert "in evaluation mode, where Dropout take less memory" in told
    assert "model.train()" in told
    (told,) = autobalance.profile(model.train(), rows, training=False).notes
    assert "in training mode, where Dropout take more memory" in told
    assert "model.eval()" in told


def test_a_mode_that_makes_no_difference_is_not_told() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.LayerNorm(8))
    assert autobalance.profile(model.eval(), torch.zeros(4, 8)).notes == ()
    assert autobalance.profile(model.train(), torch.zeros(4, 8), training=False).notes == ()
