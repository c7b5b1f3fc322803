from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autobalance.blocks import find_blocks


class Net(nn.Module):
    """Declares what `declare` returns."""

    def __init__(self, declare: Callable[[Net], Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.side = nn.ModuleDict({"left": nn.Linear(4, 4), "right": nn.Linear(4, 4)})
        self.norm = nn.LayerNorm(4)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8))
        self.weights = nn.ParameterList([torch.zeros(2)])
        self.scale = nn.Parameter(torch.ones(1))
        self.also_head = self.head
        self.declare = declare

    def self_balance(self) -> Any:
        return self.declare(self)


def names(declare: Callable[[Net], Any]) -> tuple[str, ...]:
    return find_blocks(Net(declare)).names


@pytest.mark.parametrize(
    ("declare", "expected"),
    [
        (lambda net: [net.embed, *net.layers, net.head], ("embed", "layers.0", "layers.1", "layers.2", "head")),
        (lambda net: ["embed", "layers.1", net.head], ("embed", "layers.1", "head")),
        (lambda net: [net.head, net.embed], ("head", "embed")),
        (lambda net: [net.embed, [net.norm, "head"]], ("embed", "norm+head")),
        (lambda net: ["embed", ("layers.0", "layers.2"), net.layers[1]], ("embed", "layers.0+layers.2", "layers.1")),
        (lambda net: [[net.embed], net.head], ("embed", "head")),
        (lambda net: net.layers, ("layers.0", "layers.1", "layers.2")),
        (lambda net: (module for module in net.layers), ("layers.0", "layers.1", "layers.2")),
        (lambda net: ["also_head"], ("head",)),
        (lambda net: ["head.1"], ("head.1",)),
    ],
)
def test_modules_names_and_groups_become_blocks(declare: Callable[[Net], Any], expected: tuple[str, ...]) -> None:
    assert names(declare) == expected


def test_a_group_keeps_its_modules_in_order() -> None:
    net = Net(lambda net: [[net.head, net.embed]])
    (block,) = find_blocks(net)
    assert block.name == "head+embed"
    assert block.modules == (net.head, net.embed)


def test_none_leaves_the_search_to_autobalance() -> None:
    assert names(lambda net: None)[:2] == ("embed", "layers.0")


@pytest.mark.parametrize(
    ("declare", "error", "message"),
    [
        (
            lambda net: [net.head, net.embed, net.head[0]],
            ValueError,
            "`Net.self_balance()` returned both 'head' and 'head.0', which lies inside it. A block is placed as one: "
            "return either the whole or its parts.",
        ),
        (
            lambda net: [[net.embed, "head.1"], "head"],
            ValueError,
            "`Net.self_balance()` returned both 'head' and 'head.1', which lies inside it.",
        ),
        (
            lambda net: [net.embed, net.head, "also_head"],
            ValueError,
            "`Net.self_balance()` returned 'head' more than once. Return each module once; one that is called several "
            "times is still one block.",
        ),
        (
            lambda net: [net.embed, [net.norm, net.embed], net.norm],
            ValueError,
            "`Net.self_balance()` returned 'embed', 'norm' more than once.",
        ),
        (
            lambda net: [net.embed, nn.Linear(3, 4)],
            ValueError,
            "`Net.self_balance()` returned a Linear that is not part of the model. Return a module that the model "
            "registers: one assigned to an attribute of it, or kept in an `nn.ModuleList`.",
        ),
        (
            lambda net: [net],
            ValueError,
            "`Net.self_balance()` returned the model itself. Return the parts that may be placed apart.",
        ),
        (
            lambda net: ["embde", "head"],
            ValueError,
            "`Net.self_balance()` returned the name 'embde', which the model does not have. Did you mean 'embed'",
        ),
        (
            lambda net: ["zzz"],
            ValueError,
            "`Net.self_balance()` returned the name 'zzz', which the model does not have. It has 'embed', 'layers', ",
        ),
        (
            lambda net: [net.embed, net.layers],
            ValueError,
            "`Net.self_balance()` returned 'layers', a ModuleList, which is never called itself. Return its items: "
            "`*self.layers` for a block each, `list(self.layers)` for one block.",
        ),
        (
            lambda net: [["embed", "side"]],
            ValueError,
            "`Net.self_balance()` returned 'side', a ModuleDict, which is never called itself. Return its items: "
            "`*self.side.values()` for a block each, `list(self.side.values())` for one block.",
        ),
        (
            lambda net: [net.weights],
            ValueError,
            "`Net.self_balance()` returned 'weights', a ParameterList, which is never called. Leave it out: parameters "
            "outside every block go to the device of whoever uses them.",
        ),
        (
            lambda net: [net.embed, net.scale],
            TypeError,
            "`Net.self_balance()` returned a Parameter of shape (1,), which is neither a module nor a name. "
            "Leave it out: a tensor outside every block goes to the device of whoever uses it.",
        ),
        (
            lambda net: [net.embed, 3],
            TypeError,
            "`Net.self_balance()` returned an int (3), which is neither a module nor a name.",
        ),
        (
            lambda net: [[net.embed, [net.norm]]],
            TypeError,
            "which is neither a module nor a name. Groups cannot be nested: a list inside the list is one block.",
        ),
        (
            lambda net: [],
            ValueError,
            "`Net.self_balance()` returned no block. Return the modules to place, or None to have them found.",
        ),
        (
            lambda net: [net.embed, []],
            ValueError,
            "`Net.self_balance()` returned an empty group. Name the modules of that block, or drop it.",
        ),
        (
            lambda net: "embed",
            TypeError,
            "`Net.self_balance()` returned the text 'embed'. Return a list of modules or of their names, such as "
            "`[self.embed, *self.layers, self.head]`.",
        ),
        (
            lambda net: net.embed,
            TypeError,
            "`Net.self_balance()` returned an Embedding (Embedding(8, 4)). Return a list",
        ),
        (lambda net: net.side, TypeError, "`Net.self_balance()` returned a ModuleDict. Return a list"),
        (lambda net: {"a": net.embed}, TypeError, "`Net.self_balance()` returned a dict"),
        (lambda net: 4, TypeError, "`Net.self_balance()` returned an int (4). Return a list"),
    ],
)
def test_bad_entries_are_refused_by_name(declare: Callable[[Net], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        names(declare)


def test_a_plain_class_may_declare() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def self_balance(self) -> list[nn.Module]:
            return [self.b]

    assert find_blocks(Plain()).names == ("b",)
