"""Where the user gives no step, the model is called with the batch and its output is made a loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobalance.profiling.default_step import call_model, default_step


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.value


ONE, TWO = torch.tensor(1.0), torch.tensor([2.0, 3.0])


@pytest.mark.parametrize(
    ("output", "loss"),
    [
        (TWO, 5.0),
        ({"loss": ONE, "logits": TWO}, 1.0),
        (SimpleNamespace(loss=ONE, logits=TWO), 1.0),
        ({"logits": TWO, "more": [TWO, {"deep": ONE}]}, 11.0),
        ((TWO, torch.tensor([1, 2])), 5.0),
    ],
    ids=["tensor", "loss in a dict", "loss attribute", "nested", "integers are no part of it"],
)
def test_loss_is_the_outputs_own_or_the_sum_of_its_floats(output: Any, loss: float) -> None:
    assert default_step(Returns(output), ONE).item() == loss


def test_output_without_floats_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Returns returned list, which holds no floating tensor .* Pass `step=`"):
        default_step(Returns([torch.tensor(1)]), ONE)


def test_batch_decides_how_the_model_is_called() -> None:
    def record(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    class Records(nn.Module):
        def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
            return record(*args, **kwargs)

    assert call_model(Records(), {"x": ONE}) == ((), {"x": ONE})
    assert call_model(Records(), (ONE, TWO)) == ((ONE, TWO), {})
    assert call_model(Records(), [ONE, TWO]) == (([ONE, TWO],), {})
