from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from autobalance.profiling.batches import samples_in, with_samples


class Carrier:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, device: object) -> Carrier:
        return self


@dataclass
class Sample:
    image: Tensor
    label: str


def test_samples_are_the_first_dimension_of_every_tensor_however_nested() -> None:
    batch = {"x": [torch.zeros(6, 2), (torch.zeros(6), None)], "scale": torch.tensor(2.0), "n": 3}
    assert samples_in(batch) == 6
    assert samples_in(Carrier(torch.zeros(5, 1))) == 5
    assert samples_in(Sample(torch.zeros(4), "a")) == 4


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ("words", "holds no tensor"),
        (torch.tensor(1.0), "holds no tensor"),
        ((torch.zeros(8, 2), torch.zeros(3)), r"different first dimensions \(3, 8\)"),
    ],
)
def test_a_batch_that_does_not_tell_is_refused(batch: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        samples_in(batch)


def test_rows_are_left_out_or_repeated_and_all_else_stays() -> None:
    image = torch.arange(6).view(3, 2)
    batch = {"x": image, "again": [image], "scale": torch.tensor(2.0), "carrier": Carrier(image)}
    more = with_samples(batch, 4)
    assert more["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert more["again"][0] is more["x"]
    assert more["scale"] is batch["scale"]
    assert more["carrier"].tensor.shape == (4, 2)
    assert with_samples(batch, 2)["x"].tolist() == [[0, 1], [2, 3]]
    assert batch["x"] is image
    assert batch["carrier"].tensor is image


def test_gradients_of_the_batch_stay_wanted() -> None:
    assert with_samples(torch.zeros(2, 3, requires_grad=True), 3).requires_grad
