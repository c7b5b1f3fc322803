from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autobalance
from autobalance.partitioning.chains.chain import Chain, Item
from autobalance.partitioning.orders.folded import cut_bytes, folded_chain, folded_units
from autobalance.partitioning.replay import replay
from autobalance.partitioning.transfers import Crossing, bytes_moved, crossings_of
from autobalance.profiling.timeline import ROOT


def _u_shape(depth: int, skip: int = 1, step: int = 1) -> list[Crossing]:
    """Blocks `0 ... 2 depth`, each passing a tensor on; block `i` also passes one to block `2 depth - i`."""
    onward = [Crossing(block, (block + 1,), step, True) for block in range(2 * depth)]
    return [*onward, *(Crossing(block, (2 * depth - block,), skip, True) for block in range(depth))]


def test_symmetric_skips_pair_each_block_with_its_mirror_image() -> None:
    assert folded_units(9, _u_shape(4)) == ((0, 8), (1, 7), (2, 6), (3, 5), (4,))


def test_blocks_without_a_skip_take_turns_and_the_innermost_ones_stay_in_call_order() -> None:
    skips = [Crossing(1, (9,), 50, True), Crossing(3, (6,), 50, True)]
    onward = [Crossing(block, (block + 1,), 1, True) for block in range(10)]
    assert folded_units(11, [*onward, *skips]) == ((0,), (10,), (1, 9), (2,), (8,), (7,), (3, 6), (4,), (5,))


def test_the_folded_chain_has_every_block_once() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        count = rng.randint(3, 12)
        skips = [
            Crossing(a, (b,), rng.randint(1, 9), True) for a, b in combinations(range(count), 2) if rng.random() < 0.4
        ]
        units = folded_units(count, skips)
        assert units is None or sorted(block for unit in units for block in unit) == list(range(count))


@pytest.mark.parametrize("seed", range(20))
def test_the_nest_that_is_kept_on_one_device_is_the_heaviest(seed: int) -> None:
    rng = random.Random(seed)
    weights = {pair: rng.randint(1, 20) for pair in combinations(range(9), 2) if pair[1] - pair[0] > 1}
    skips = dict(rng.sample(sorted(weights.items()), 7))
    best = 0
    for size in range(1, 5):
        for nest in combinations(sorted(skips), size):
            if all(one[0] < other[0] and other[1] < one[1] for one, other in pairwise(nest)):
                best = max(best, sum(skips[skip] for skip in nest))
    # Nothing passes from each block to the next, so that folding always pays.
    units = folded_units(9, [Crossing(a, (b,), weight, False) for (a, b), weight in skips.items()])
    if units is not None:
        assert sum(skips.get(unit, 0) for unit in units if len(unit) == 2) == best


def test_plain_chains_residuals_and_what_all_blocks_are_given_are_not_folded() -> None:
    onward = [Crossing(block, (block + 1,), 4, True) for block in range(9)]
    residuals = [Crossing(block, (block + 2,), 4, True) for block in range(8)]
    assert folded_units(10, onward) is None
    assert folded_units(10, [*onward, *residuals]) is None
    assert folded_units(10, [*onward, Crossing(ROOT, tuple(range(10)), 4, False)]) is None
    assert folded_units(50, [Crossing(block, (block + 1,), 4, True) for block in range(49)] + residuals[:1]) is None
    # The encoder's output, which every block of a decoder reads.
    assert folded_units(10, [*onward, Crossing(4, tuple(range(5, 10)), 4, True)]) is None


def test_a_cut_of_the_folded_chain_moves_what_passes_it_twice_and_no_skip() -> None:
    crossings = _u_shape(5, skip=1, step=1)
    units = folded_units(11, crossings)
    assert units is not None
    assert cut_bytes(units, crossings).tolist() == [4.0] * 5  # down and up, each with its gradient
    # In call order the cut after block 3 leaves the skips of blocks 0 to 3 on the other side.
    assert cut_bytes([(block,) for block in range(11)], crossings)[3] == 2 * (1 + 4)


def test_a_chain_is_folded_unit_by_unit_and_keeps_what_it_is_bound_to() -> None:
    # Blocks 1 and 2 share a device, and so do 0 and 8, which are beside the chain; the root is with the last unit.
    crossings = [*_u_shape(4, skip=3), Crossing(8, (ROOT,), 1, True), Crossing(ROOT, (0,), 1, False)]
    units = ((1, 2), (3,), (4,), (5,), (6, 7, ROOT))
    chain = Chain(units, items=(Item((0, 8), None),), bound={1: 1})
    folded = folded_chain(chain, crossings)
    assert folded == Chain(((1, 2, 6, 7, ROOT), (3, 5), (4,)), chain.items, {1: 1})
    assert folded_chain(replace(chain, bound={1: 1, 3: 0}), crossings) is None
    assert folded_chain(chain, crossings[:8]) is None


class _Conv(nn.Module):
    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, stride, 1)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        return torch.relu(self.conv(x if skip is None else torch.cat([x, skip], 1)))


class _UNet(nn.Module):
    """Two blocks with a skip each at every one of three resolutions."""

    def __init__(self) -> None:
        super().__init__()
        widths = (4, 8, 16)
        self.stem = _Conv(3, 4)
        self.down = nn.ModuleList(_Conv(width, width) for width in widths)
        self.again = nn.ModuleList(_Conv(width, width) for width in widths)
        self.smaller = nn.ModuleList(_Conv(width, 2 * width, 2) for width in widths[:-1])
        self.up = nn.ModuleList(_Conv(2 * width, width) for width in widths)
        self.join = nn.ModuleList(_Conv(2 * width, max(4, width // 2)) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for level in range(3):
            skips.append(self.down[level](x))
            skips.append(self.again[level](skips[-1]))
            x = self.smaller[level](skips[-1]) if level < 2 else skips[-1]
        for level in reversed(range(3)):
            x = self.up[level](x, skips.pop())
            x = self.join[level](x, skips.pop())
            x = F.interpolate(x, scale_factor=2.0) if level else x
        return x

    def self_balance(self) -> list[nn.Module]:
        down = [block for blocks in zip(self.down, self.again, self.smaller, strict=False) for block in blocks]
        up = [self.up[level] for level in range(3)]
        return [self.stem, *down, self.down[2], self.again[2], *up, *self.join]


def _assignment(units: Sequence[Sequence[int]], cuts: Sequence[int]) -> tuple[int, ...]:
    stages = [(device, start, stop) for device, (start, stop) in enumerate(pairwise(cuts))]
    return Chain((*units, (ROOT,)), (), {}).assignment([*stages, (0, len(units), len(units) + 1)], ())[0]


def _cuts(units: Sequence[Sequence[int]], devices: int) -> list[tuple[int, ...]]:
    inner = combinations(range(1, len(units)), devices - 1)
    return [_assignment(units, (0, *cuts, len(units))) for cuts in inner]


def _moved(crossings: Sequence[Crossing], assignment: Sequence[int]) -> int:
    return sum(bytes_moved(crossings, assignment, assignment[-1]).values())


def test_a_folded_u_net_moves_less_than_half_of_what_an_equally_balanced_cut_in_call_order_moves() -> None:
    profile = autobalance.profile(_UNet(), torch.randn(1, 3, 16, 16))
    crossings, count = crossings_of(profile), len(profile.blocks)
    units = folded_units(count, crossings)
    assert units is not None
    peaks = {cut: max(replay(profile.timeline, cut, cut[-1], 2)) for cut in _cuts(units, 2)}
    folded = min(peaks, key=peaks.__getitem__)
    in_call_order = _cuts([(block,) for block in range(count)], 2)
    balanced = [cut for cut in in_call_order if max(replay(profile.timeline, cut, cut[-1], 2)) <= 1.1 * peaks[folded]]
    least = min(_moved(crossings, cut) for cut in balanced)
    assert 2 * _moved(crossings, folded) <= least
    plan = autobalance.plan(profile, [int(1.1 * peaks[folded])] * 2)
    assert len(plan.stages) == 3
    assert len({stage.device for stage in plan.stages}) == 2
    assert 2 * sum(bytes_moved(crossings, plan.assignment, plan.root).values()) <= least
    assert sum(stage.received for stage in plan.stages) == sum(
        bytes_moved(crossings, plan.assignment, plan.root).values()
    )


def test_on_four_devices_a_folded_chain_of_equal_blocks_moves_less_than_half() -> None:
    crossings = _u_shape(24)
    units = folded_units(49, crossings)
    assert units is not None
    folded = _moved(crossings, _assignment(units, (0, 6, 12, 18, 25)))
    assert folded == 3 * 2 * 2  # at each of three cuts down and up, with gradients
    in_call_order = _moved(crossings, [block * 4 // 49 for block in range(49)])
    assert in_call_order == 2 * (3 + 24)  # all skips as well: none has both of its ends in one quarter
    assert 2 * folded <= in_call_order
