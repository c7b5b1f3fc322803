"""How one step of a plain module runs."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobalance.profiling.trial import Batch, PlainTrial


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "8-mixed"}, r"precision='8-mixed' is not supported .* '32-true', .*'bf16-true', '16-true'"),
        ({"accumulate": 0}, r"accumulate=0 is no number of batches per optimizer step: say 1 or more"),
        ({"accumulate": 2.5}, r"accumulate=2.5 is no number of batches"),
        ({"accumulate": True}, r"accumulate=True is no number of batches"),
        ({"clip": 0.0}, r"clip=0.0 would leave nothing of the gradients: .* above 0, or None"),
        ({"clip": float("nan")}, r"clip=nan would leave nothing"),
        ({"training": False, "accumulate": 4}, r"accumulate=4 and clip=None are about gradients"),
        ({"training": False, "clip": 1.0}, r"accumulate=1 and clip=1.0 are about gradients"),
    ],
)
def test_nonsense_is_refused_with_what_to_say_instead(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlainTrial(**options)


class Recorder:
    """Runs a trial on real tensors of the CPU and writes down what is alive at each moment."""

    def __init__(self, model: nn.Module, trial: PlainTrial) -> None:
        self.model = model
        self.moments: list[tuple[str, bool, float]] = []
        trial.prepare(model, torch.device("cpu"))
        trial.run(model, Batch("train batch", "train", torch.ones(4, 3)), nullcontext, self._mark)

    def _mark(self, name: str) -> None:
        gradient = next(self.model.parameters()).grad
        self.moments.append((name, gradient is not None, 0.0 if gradient is None else float(gradient.norm())))


def linear() -> nn.Module:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def test_gradients_of_accumulated_batches_are_added_and_stay_until_the_next_step() -> None:
    once = Recorder(linear(), PlainTrial(partial(torch.optim.SGD, lr=0.0))).moments
    thrice = Recorder(linear(), PlainTrial(partial(torch.optim.SGD, lr=0.0), accumulate=3)).moments
    phases = ["step 1 forward", "step 1 backward"] * 3 + ["step 1 optimizer", "step 1 end"]
    assert [name for name, _, _ in thrice[:8]] == phases
    assert [alive for _, alive, _ in thrice[:8]] == [False, False, True, True, True, True, True, True]
    assert [alive for _, alive, _ in thrice[8:10]] == [False, False]
    # The mean of three equal batches has the gradient of one.
    assert thrice[6][2] == pytest.approx(once[2][2])


def test_gradients_are_clipped_before_the_step() -> None:
    moments = {name: norm for name, _, norm in Recorder(linear(), PlainTrial(torch.optim.AdamW, clip=0.5)).moments}
    assert moments["step 1 optimizer"] > 1.0
    assert moments["step 1 end"] == pytest.approx(0.5, rel=1e-3)


def test_scaler_of_16_bit_gradients_steps_and_gives_them_back_unscaled() -> None:
    model = linear()
    moments = {
        name: norm for name, _, norm in Recorder(model, PlainTrial(torch.optim.SGD, precision="16-mixed")).moments
    }
    assert moments["step 1 optimizer"] == pytest.approx(moments["step 1 end"] * 2.0**16)
    assert not torch.equal(next(model.parameters()), torch.ones(1, 3))


def test_true_half_precision_casts_the_batch_and_what_is_made_from_nothing() -> None:
    seen: list[torch.dtype] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        seen.extend((batch.dtype, torch.ones(1).dtype))
        return model(batch).sum()

    Recorder(linear().bfloat16(), PlainTrial(torch.optim.SGD, step, "bf16-true"))
    assert set(seen) == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
