from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autobalance.blocks.blocks import Blocks
from autobalance.execution.micro_batch import MicroBatch
from autobalance.execution.pipeline import Pipeline
from autobalance.execution.savings.recompute import recompute
from autobalance.execution.seeds import SeededVisits, glue_seed, step_seed, visit_seed
from autobalance.placement.hooks import Door
from autobalance.placement.install import install
from autobalance.placement.locate import DeviceLocator
from autobalance.placement.place import place
from autobalance.simulated import simulate

BLOCKS = 4
PARTS = 5

Call = Callable[[nn.Module, Tensor], Tensor]


def plainly(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)  # type: ignore[no-any-return]


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


def checkpointed_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    x = x if x.requires_grad else x.requires_grad_()  # else it sees nothing to go back to
    return checkpoint(block, x, use_reentrant=True)  # type: ignore[no-any-return]


def checkpointed_around_two(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda x: block(torch.dropout(x, 0.2, True)), x, use_reentrant=False)  # type: ignore[no-any-return]


class Dropping(nn.Module):
    """Drops inside of blocks and between them, and calls its second block twice."""

    def __init__(self, call: Call = plainly) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)) for _ in range(BLOCKS))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.call(block, x)
            if number == 1:
                x = torch.dropout(self.call(block, x), 0.3, True)
        return x


def run(
    schedule: str = "gpipe",
    assignment: Sequence[int] = (0, 0, 1, 1),
    call: Call = plainly,
    seed: int | None = 11,
    recomputed: Sequence[int] = (),
    parts: int = PARTS,
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of the micro-batches and gradients of the weights, on the host."""
    with simulate(4):
        net = Dropping(call)
        names = tuple(f"blocks.{index}" for index in range(BLOCKS))
        blocks = Blocks(names, tuple((block,) for block in net.blocks))
        devices = [torch.device("simulated", index) for index in assignment]
        stage_of = [0]
        for before, after in pairwise(assignment):
            stage_of.append(stage_of[-1] + (before != after))
        stages = [assignment[stage_of.index(stage)] for stage in range(stage_of[-1] + 1)]
        pipeline = Pipeline(schedule, stage_of, stages, beside=[SeededVisits(names, devices)])
        place(net, blocks, devices, {}, devices[-1])
        locator = DeviceLocator(devices)
        for index in recomputed:
            recompute(Door(names[index], devices[index], locator), devices[index], net.blocks[index], ["forward"])
        installed = install(net, blocks, devices, locator, visitor=pipeline)
        inputs = torch.randn(parts, 2, 6, generator=torch.Generator().manual_seed(1))
        outputs: dict[int, Tensor] = {}

        def forward(number: int) -> None:
            with installed.glue():
                outputs[number] = net(inputs[number].to(devices[0]))

        def backward(numbers: Sequence[int]) -> None:
            losses = [outputs[number].square().sum() for number in numbers]
            sum(losses[1:], start=losses[0]).backward()

        pipeline.train(parts, forward, backward, seed)
        seen = [outputs[number].detach().cpu() for number in range(parts)]
        return seen, [parameter.grad.cpu() for parameter in net.parameters() if parameter.grad is not None]


def assert_same(ours: tuple[list[Tensor], list[Tensor]], theirs: tuple[list[Tensor], list[Tensor]]) -> None:
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(one, other)  # sums over micro-batches come in another order


@pytest.fixture(scope="module")
def reference() -> tuple[list[Tensor], list[Tensor]]:
    return run("naive", (0, 0, 0, 0))


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "looped"])
@pytest.mark.parametrize("assignment", [(0, 0, 1, 1), (2, 1, 0, 0), (0, 1, 0, 1)])
def test_masks_depend_on_neither_schedule_nor_placement(
    schedule: str, assignment: tuple[int, ...], reference: tuple[list[Tensor], list[Tensor]]
) -> None:
    assert_same(run(schedule, assignment), reference)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "looped"])
def test_recomputed_blocks_draw_the_same(schedule: str, reference: tuple[list[Tensor], list[Tensor]]) -> None:
    assert_same(run(schedule, recomputed=range(BLOCKS)), reference)


@pytest.mark.parametrize("call", [checkpointed, checkpointed_reentrant])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_checkpoint_around_a_block_draws_the_same_again(
    call: Call, schedule: str, reference: tuple[list[Tensor], list[Tensor]]
) -> None:
    assert_same(run(schedule, call=call), reference)


def test_a_checkpoint_around_glue_and_a_block_draws_the_same_again() -> None:
    together = run("1f1b", call=checkpointed_around_two)
    apart = run("1f1b", call=lambda block, x: block(torch.dropout(x, 0.2, True)))
    assert_same(together, apart)


def test_a_checkpoint_around_a_block_that_recomputes_draws_the_same_again(
    reference: tuple[list[Tensor], list[Tensor]],
) -> None:
    assert_same(run("1f1b", call=checkpointed, recomputed=[1, 2]), reference)


def test_micro_batches_and_visits_draw_different_masks() -> None:
    seeds = SeededVisits(["a"], [torch.device("cpu")])
    drawn = []
    for number in range(3):
        micro_batch = MicroBatch(number, 3, seed=5)
        seeds.begin(micro_batch)
        for _ in range(2):
            drawn.append(torch.rand(4))
            seeds.enter(0, micro_batch)
            drawn.append(torch.rand(4))
            seeds.leave(0, micro_batch)
        seeds.end(micro_batch)
    assert len({tuple(values.tolist()) for values in drawn}) == 12


def test_another_step_draws_other_masks() -> None:
    assert not torch.equal(run(seed=1, parts=2)[0][0], run(seed=2, parts=2)[0][0])


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "looped"])
def test_after_a_step_generators_stand_where_they_did(schedule: str) -> None:
    torch.manual_seed(7)
    run(schedule, seed=step_seed(0), assignment=(0, 1, 0, 1))
    after = torch.rand(3)
    # Making the model and its inputs above draws as well, from a seed of its own.
    torch.manual_seed(7)
    Dropping()
    assert torch.equal(after, torch.rand(3))


def test_the_seed_of_a_step_depends_on_its_number_and_on_the_generator_of_the_cpu() -> None:
    torch.manual_seed(7)
    seeds = [step_seed(0), step_seed(1)]
    torch.rand(1)
    seeds.append(step_seed(0))
    torch.manual_seed(8)
    seeds.append(step_seed(0))
    assert len(set(seeds)) == 4
    torch.manual_seed(7)
    with torch.device("meta"):
        assert [step_seed(0), step_seed(1)] == seeds[:2]


def test_without_a_seed_generators_are_left_alone() -> None:
    seeds, micro_batch = SeededVisits(["a"], [torch.device("cpu")]), MicroBatch(0, 1)
    torch.manual_seed(7)
    seeds.begin(micro_batch)
    seeds.enter(0, micro_batch)
    drawn = torch.rand(2)
    seeds.leave(0, micro_batch)
    seeds.end(micro_batch)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(2))


def test_a_suspended_micro_batch_draws_on_where_it_was() -> None:
    seeds = SeededVisits(["a"], [torch.device("cpu")])
    micro_batch = MicroBatch(0, 2, seed=5)

    def draw(suspended: bool) -> list[float]:
        seeds.begin(micro_batch)
        first = torch.rand(1)
        if suspended:
            seeds.suspend(micro_batch)
            torch.rand(5)
            seeds.resume(micro_batch)
        drawn = [float(first), float(torch.rand(1))]
        seeds.end(micro_batch)
        return drawn

    assert draw(suspended=True) == draw(suspended=False)


def test_what_others_draw_meanwhile_is_theirs() -> None:
    seeds, micro_batch = SeededVisits(["a"], [torch.device("cpu")]), MicroBatch(0, 2, seed=5)
    torch.manual_seed(7)
    seeds.begin(micro_batch)
    torch.rand(3)
    seeds.suspend(micro_batch)
    first = torch.rand(1)
    seeds.resume(micro_batch)
    torch.rand(3)
    seeds.end(micro_batch)
    second = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(1), torch.rand(1)]))


def test_a_micro_batch_that_is_wound_down_leaves_the_generators_to_others() -> None:
    seeds, micro_batch = SeededVisits(["a"], [torch.device("cpu")]), MicroBatch(0, 2, seed=5)
    torch.manual_seed(7)
    seeds.begin(micro_batch)
    seeds.suspend(micro_batch)
    torch.rand(1)
    seeds.end(micro_batch)
    after = torch.rand(1)
    torch.manual_seed(7)
    torch.rand(1)
    assert torch.equal(after, torch.rand(1))


def test_generators_of_others_are_left_alone() -> None:
    own, numpy_before = torch.Generator().manual_seed(1), np.random.get_state()
    own_before, python_before = own.get_state(), random.getstate()
    seeds, micro_batch = SeededVisits(["a"], [torch.device("cpu")]), MicroBatch(0, 2, seed=5)
    seeds.begin(micro_batch)
    seeds.enter(0, micro_batch)
    seeds.leave(0, micro_batch)
    seeds.end(micro_batch)
    assert torch.equal(own.get_state(), own_before)
    assert random.getstate() == python_before
    numpy_after: Any = np.random.get_state()
    assert all(np.array_equal(one, other) for one, other in zip(numpy_before, numpy_after, strict=True))


def test_seeds_are_the_same_in_every_process() -> None:
    told = "('block', 5, 'layers.0', 2, 1)"
    digest = hashlib.blake2b(told.encode(), digest_size=8).digest()
    assert visit_seed(5, "layers.0", 2, 1) == int.from_bytes(digest, "big") // 2
    assert 0 <= visit_seed(5, "layers.0", 2, 1) < 2**63
    assert (
        len({visit_seed(step, "a", visit, part) for step in range(9) for visit in range(9) for part in range(9)}) == 729
    )
    assert glue_seed(5, 1) != glue_seed(5, 0)
