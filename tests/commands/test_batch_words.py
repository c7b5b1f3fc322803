from __future__ import annotations

import pytest
import torch

from autobalance.commands.batch_words import batch_from_words, is_batch_in_words
from autobalance.commands.host_batch import batch_on_host


def test_shapes_make_a_dict_a_tensor_or_a_tuple() -> None:
    made = batch_from_words("input_ids=int64[8,128], mask = bool[8, 128]; scale=fp32[]")
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in made.items()} == {
        "input_ids": (torch.int64, (8, 128)),
        "mask": (torch.bool, (8, 128)),
        "scale": (torch.float32, ()),
    }
    assert batch_from_words("bf16[2,3]").dtype == torch.bfloat16
    assert [tuple(tensor.shape) for tensor in batch_from_words("float32[2,3] int64[2]")] == [(2, 3), (2,)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x=float32[8,3], y:int64", r"is not understood from 'y:int64' on: write NAME=DTYPE\[SIZE,SIZE\]"),
        ("x=float33[8]", "torch has no data type 'float33'"),
        ("x=float32[8], int64[8]", "names some tensors and not others"),
        (" ", "--batch is empty"),
    ],
)
def test_other_words_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_from_words(text)


def test_shapes_are_told_from_functions_and_numbers() -> None:
    assert is_batch_in_words("x=float32[8]")
    assert not is_batch_in_words("batches.py:make")
    assert not is_batch_in_words("8")


def test_a_batch_from_meta_is_made_of_zeros_and_others_stay_what_they_are() -> None:
    there, here = torch.empty(2, 3, device="meta", dtype=torch.int64), torch.ones(2)
    moved = batch_on_host({"x": there, "more": [here, (there, "text")]})
    assert torch.equal(moved["x"], torch.zeros(2, 3, dtype=torch.int64))
    assert moved["more"][0] is here
    assert moved["more"][1][0].device.type == "cpu"
    assert moved["more"][1][1] == "text"
