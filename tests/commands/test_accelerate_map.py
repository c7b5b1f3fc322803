from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autobalance
from autobalance import Profile
from autobalance.commands.accelerate_map import accelerate_map, module_tree
from autobalance.commands.others import other_splits

pytest.importorskip("accelerate")
KIB = 2**10


def profile(weights: list[int], names: list[str], together: tuple[tuple[int, ...], ...] = ()) -> Profile:
    """Blocks of one class under `layers`, of others elsewhere."""
    made = Profile.from_costs(static=weights, names=names, together=together)
    kinds = ["Layer" if ".layers." in name else f"Other{index}" for index, name in enumerate(names)]
    return replace(
        made, blocks=tuple(replace(block, kind=kind) for block, kind in zip(made.blocks, kinds, strict=True))
    )


NAMES = ["model.embed", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm+head"]


def test_the_tree_has_the_names_and_weights_of_the_blocks() -> None:
    tree = module_tree(profile([4, 6, 6, 6, 2], NAMES))
    assert [name for name, _ in tree.named_children()] == ["model", "head"]
    assert {name: parameter.nbytes for name, parameter in tree.named_parameters()} == {
        "model.embed.weights": 4,
        "model.layers.0.weights": 6,
        "model.layers.1.weights": 6,
        "model.layers.2.weights": 6,
        "model.norm.weights": 2,
    }
    assert all(parameter.is_meta for parameter in tree.parameters())


def test_blocks_are_filled_up_to_an_even_share_and_a_quarter_more_than_a_layer() -> None:
    # 24 of weights: 12 for each device and 1.25 x 6 beside, 19. The first keeps room for the largest layer: 13 is left,
    # in which the embedding and one layer fit.
    assert accelerate_map(profile([4, 6, 6, 6, 2], NAMES), [100, 100]) == [0, 0, 1, 1, 1]


def test_what_fits_nowhere_is_left_on_disk() -> None:
    made = profile([4, 6, 6, 6, 2], NAMES)
    places = accelerate_map(made, [12, 12])
    assert places == [0, 1, 1, "disk", "disk"]
    split = other_splits(made, [12, 12])[0]
    assert split.device_map is None
    assert split.reason == "it leaves 2 of 5 blocks on disk"


def test_tied_blocks_stay_together() -> None:
    places = accelerate_map(profile([4, 6, 6, 6, 2], NAMES, together=((0, 4),)), [100, 100])
    assert places[0] == places[4]


class Layer(nn.Module):
    """Its weights fill whole pieces of 512 bytes, so that a row says of them what the tensors do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 128)
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.head = nn.Linear(128, 500, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("budgets", [[2**23] * 2, [2**23] * 3, [2**20] * 3, [600 * KIB] * 3])
def test_rows_are_placed_as_the_model_itself_is(budgets: list[int]) -> None:
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    model = Net()
    made = autobalance.profile(model, torch.zeros(2, 4, dtype=torch.int64), target="simulated")
    limits = get_balanced_memory(model, max_memory=dict(enumerate(budgets)), no_split_module_classes=["Layer"])
    found = infer_auto_device_map(model, max_memory=limits, no_split_module_classes=["Layer"], clean_result=False)
    theirs = dict(found)
    for name, place in zip(made.names, accelerate_map(made, budgets), strict=True):
        around = name if name in theirs else name.rpartition(".")[0]
        assert theirs[around] == place, name
