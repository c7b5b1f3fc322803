from __future__ import annotations

import re

import pytest
from torch import nn

from autobalance.blocks import Block, Blocks


def three() -> tuple[nn.Sequential, Blocks]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    return model, Blocks.of(model, [[model[0]], [model[1], model[2]], [model[3]]])


def test_blocks_are_named_as_the_model_names_their_modules() -> None:
    model, blocks = three()
    assert blocks.names == ("0", "1+2", "3")
    assert blocks.modules == ((model[0],), (model[1], model[2]), (model[3],))
    assert len(blocks) == 3


def test_iterating_gives_each_block() -> None:
    model, blocks = three()
    block = list(blocks)[1]
    assert isinstance(block, Block)
    assert (block.name, block.modules) == ("1+2", (model[1], model[2]))


def test_ordered_takes_modules_along() -> None:
    model, blocks = three()
    turned = blocks.ordered(["3", "0", "1+2"])
    assert turned.names == ("3", "0", "1+2")
    assert turned.modules == ((model[3],), (model[0],), (model[1], model[2]))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["0", "1+2"],
            "the plan was made for other blocks than the model has: the plan lacks '3'. Make a plan for this",
        ),
        (["0", "1+2", "3", "4"], "than the model has: the model lacks '4'."),
        (["0", "1", "3"], "than the model has: the plan lacks '1+2'; the model lacks '1'."),
        (["0", "0", "1+2", "3"], "than the model has: the plan repeats '0'."),
    ],
)
def test_ordered_refuses_the_names_of_another_model(names: list[str], message: str) -> None:
    _, blocks = three()
    with pytest.raises(ValueError, match=re.escape(message)):
        blocks.ordered(names)
