from __future__ import annotations

import torch
from torch import nn

from autobalance.blocks import Blocks, find_blocks
from autobalance.blocks.ties import find_ties


def linears(count: int) -> list[nn.Linear]:
    return [nn.Linear(4, 4) for _ in range(count)]


def test_separate_blocks_are_not_tied() -> None:
    assert find_ties([[linear] for linear in linears(4)]) == ()


def test_a_shared_parameter_ties() -> None:
    blocks = linears(4)
    blocks[3].weight = blocks[0].weight
    assert find_ties([[linear] for linear in blocks]) == ((0, 3),)


def test_a_module_inside_two_blocks_ties() -> None:
    shared, other = linears(2)
    blocks = [nn.Sequential(shared), other, nn.ModuleDict({"inner": shared})]
    assert find_ties([[block] for block in blocks]) == ((0, 2),)


def test_a_shared_part_without_tensors_does_not_tie() -> None:
    activation = nn.ReLU()
    assert find_ties([[nn.Sequential(linear, activation)] for linear in linears(2)]) == ()


def test_a_shared_buffer_ties() -> None:
    blocks = linears(3)
    mask = torch.ones(4)
    for block in blocks[1:]:
        block.register_buffer("mask", mask, persistent=False)
    assert find_ties([[block] for block in blocks]) == ((1, 2),)


def test_views_of_one_memory_tie() -> None:
    blocks = linears(3)
    table = torch.zeros(8, 4)
    blocks[0].weight = nn.Parameter(table[:4])
    blocks[2].weight = nn.Parameter(table[4:])
    assert find_ties([[block] for block in blocks]) == ((0, 2),)


def test_ties_on_meta_are_by_identity_not_by_address() -> None:
    blocks = [nn.Linear(4, 4, device="meta") for _ in range(3)]
    blocks[2].bias = blocks[1].bias
    assert find_ties([[block] for block in blocks]) == ((1, 2),)


def test_chains_of_ties_become_one_group() -> None:
    blocks = linears(6)
    blocks[4].weight = blocks[0].weight
    blocks[4].bias = blocks[2].bias
    blocks[5].weight = blocks[1].weight
    assert find_ties([[block] for block in blocks]) == ((0, 2, 4), (1, 5))


def test_a_group_is_tied_as_one() -> None:
    first, second, third = linears(3)
    third.weight = second.weight
    assert find_ties([[first, second], [third]]) == ((0, 1),)


def test_empty_and_lazy_tensors_tie_nothing() -> None:
    empty = [nn.ParameterList([torch.empty(0)]) for _ in range(2)]
    lazy = [nn.LazyLinear(2) for _ in range(2)]
    assert find_ties([[block] for block in (*empty, *lazy)]) == ()


def test_frozen_sparse_buffers_are_told_apart() -> None:
    blocks = linears(2)
    for block in blocks:
        block.register_buffer("graph", torch.eye(4).to_sparse())
    assert find_ties([[block] for block in blocks]) == ()


def test_an_embedding_tied_to_the_head_is_seen_in_the_blocks_of_a_model() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.middle = nn.Linear(4, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

    blocks = find_blocks(Net())
    assert blocks.names == ("embed", "middle", "head")
    assert blocks.ties == ((0, 2),)


def test_ties_follow_the_order_of_the_blocks() -> None:
    model = nn.Sequential(*linears(3))
    model[2].weight = model[0].weight
    blocks = Blocks.of(model, [[module] for module in model])
    assert blocks.ties == ((0, 2),)
    assert blocks.ordered(["1", "2", "0"]).ties == ((1, 2),)
