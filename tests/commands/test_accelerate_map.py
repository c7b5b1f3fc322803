from __future__ import annotations

from dataclasses import replace

import pytest

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
