"""Models split over simulated devices: forecast, replayed from one trace, and really run."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from autobalance.blocks import find_blocks
from autobalance.partitioning.replay import replay
from autobalance.placement.host_locator import HostLocator
from autobalance.placement.install import install
from autobalance.placement.locate import DeviceLocator
from autobalance.placement.move import Mover
from autobalance.placement.place import place
from autobalance.profiling.profile import Profile
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.trial import Batch, PlainTrial
from autobalance.simulated import simulate
from tests.benchmarks.zoo import ZOO
from tests.models import CASES
from tests.profiling.running import Spot, spot, training_step

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=False),
}


@dataclass
class Subject:
    """A model that is split.

    Attributes:
        name: in words.
        make: builds it, the same each time.
        batch: what every step gets.
        step: `step(model, batch) -> loss`.
        optimizer: name of an optimizer.
        precision: as Lightning names it.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Any
    step: Callable[[Any, Any], Tensor]
    optimizer: str = "AdamW"
    precision: str = "32-true"

    @cached_property
    def profiler(self) -> Profiler:
        """Profiles it for simulated devices."""
        trial = PlainTrial(OPTIMIZERS[self.optimizer], self.step, self.precision)
        model = self.make()
        return Profiler(model, find_blocks(model), trial, [Batch("train batch", "train", self.batch)])

    @cached_property
    def profile(self) -> Profile:
        """The trace with every block apart."""
        return self.profiler.profile()

    def contiguous(self, devices: int) -> Spot:
        """Blocks in call order, about as many on each device."""
        count = len(self.profile.blocks)
        return spot(self.profile, [index * devices // count for index in range(count)])

    def anywhere(self, devices: int, draw: random.Random) -> Spot:
        """Blocks on any device; half of the time in call order."""
        assignment = [draw.randrange(devices) for _ in self.profile.blocks]
        return spot(self.profile, sorted(assignment) if draw.random() < 0.5 else assignment)

    def replayed(self, where: Spot, devices: int) -> list[int]:
        """Peak bytes per device, from the one trace."""
        return replay(self.profile.timeline, where.assignment, where.root, devices)

    def forecast(self, where: Spot, devices: int) -> list[int]:
        """Peak bytes per device, from another trace with the placement installed."""
        found = self.profiler.forecast(where.names, where.assignment, where.loose, where.root, devices)
        return [device.peak for device in found]

    def counted(self, where: Spot, devices: int) -> list[int]:
        """Peak bytes per device of a real run."""
        with simulate([2**50] * devices):
            self.run(where, devices)
            return [torch.simulated.max_memory_allocated(index) for index in range(devices)]

    def runs_within(self, where: Spot, capacities: Sequence[int]) -> bool:
        """Whether a real run on devices of these capacities comes to its end."""
        gc.collect()  # what an earlier run left in circles would count
        with simulate(capacities):
            try:
                self.run(where, len(capacities))
            except torch.OutOfMemoryError:
                return False
        return True

    def run(self, where: Spot, count: int, steps: int = 3) -> None:
        """Train as placed: an ordinary loop over real numbers."""
        gc.collect()
        devices = [torch.device("simulated", index) for index in range(count)]
        model = self.make()
        blocks = find_blocks(model).ordered(where.names)
        places = [devices[index] for index in where.assignment]
        place(model, blocks, places, {name: devices[at] for name, at in where.loose.items()}, devices[where.root])
        glue = install(model, blocks, places, DeviceLocator(devices), None).glue
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        for _ in range(steps):
            moved = Mover(HostLocator(), devices[where.root]).move(self.batch)
            optimizer.zero_grad()
            with glue(), torch.autocast("simulated", torch.bfloat16, enabled=self.precision == "bf16-mixed"):
                loss = self.step(model, moved)
            with glue():
                loss.backward()
            optimizer.step()


def subjects(names: Sequence[str] = (), variants: Sequence[tuple[str, str]] = (("AdamW", "32-true"),)) -> list[Subject]:
    """The zoo with small batches, and the models of the tests, in some ways to train them.

    Args:
        names: parts of names to keep; none: all.
        variants: pairs of optimizer and precision.
    """
    found: list[Subject] = []
    for optimizer, precision in variants:
        found += [
            Subject(model.name, model.make, model.batch(max(2, model.size // 8)), model.step, optimizer, precision)
            for model in ZOO.values()
        ]
        found += [
            Subject(
                f"test: {name}", partial(case.make, nn.Module), case.batches(1)[0], training_step, optimizer, precision
            )
            for name, case in CASES.items()
        ]
    return [subject for subject in found if not names or any(name in subject.name for name in names)]


def random_chains(count: int, seed: int) -> Iterator[Subject]:
    """Chains of linear layers and of transformer layers, of random depth, width and batch."""
    draw = random.Random(seed)
    for number in range(count):
        depth, width = draw.randint(4, 9), draw.choice([64, 96, 128, 160, 256])
        samples, tokens = draw.randint(4, 40), draw.choice([16, 24, 32])
        is_attention = draw.random() < 0.5
        make = partial(_chain, depth, width, is_attention, seed + number)
        shape = (samples, tokens, width) if is_attention else (samples * tokens, width)
        yield Subject(
            f"{'transformer' if is_attention else 'linear'} {depth} x {width}, batch {shape[0]}",
            make,
            torch.randn(*shape, generator=torch.Generator().manual_seed(seed + number)),
            lambda model, batch: model(batch).pow(2).mean(),
            draw.choice(list(OPTIMIZERS)),
            draw.choice(["32-true", "bf16-mixed"]),
        )


def _chain(depth: int, width: int, is_attention: bool, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if is_attention:
            layers = [nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True) for _ in range(depth)]
            return nn.Sequential(*layers)
        draw = random.Random(seed)
        widths = [width, *(draw.choice([width, 2 * width, 3 * width]) for _ in range(depth - 1)), width]
        pairs = pairwise(widths)
        return nn.Sequential(*(nn.Sequential(nn.Linear(one, other), nn.GELU()) for one, other in pairs))
