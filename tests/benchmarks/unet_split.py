"""What a split of a model with nested skips moves between devices: in call order, and folded along its skips.

Run it by hand: `OMP_NUM_THREADS=1 python tests/benchmarks/unet_split.py`. Each model is profiled training with AdamW
and split over 2 and 4 equal devices. Of the cuts of both chains whose largest peak is within 5 % of what both chains
can reach, the one that moves the fewest bytes in a step counts: plans of equal balance. Every cut is considered, by
dynamic programming over the peaks of all stages, and what is found is replayed. Beside them stands what
`autobalance.plan` chooses within budgets of these peaks. The script ends with 1 unless the first model's plans visit
devices twice and move less than half of what the best cut in call order moves.

Folding gains most where the memory lies deep in the model, so that the cuts do. Where most of it lies at the highest
resolution, several devices have to share that one, and each cut there moves its large tensors down and up.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import UNet as JoinedOutside

import autobalance
from autobalance import Profile
from autobalance.partitioning.orders.folded import folded_units
from autobalance.partitioning.replay import replay
from autobalance.partitioning.transfers import Crossing, bytes_moved, crossings_of, received
from autobalance.profiling.timeline import ROOT
from autobalance.units import format_size

SLACK = 1.05
TARGET = "A100-80GB"
Units = Sequence[Sequence[int]]


class Residual(nn.Module):
    """Two convolutions with group norm; given a skip, it joins it first."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm_1, self.norm_2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, out)
        self.short = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """Features of the same resolution."""
        x = x if skip is None else torch.cat([x, skip], 1)
        hidden = self.first(F.silu(self.norm_1(x)))
        hidden = self.second(F.silu(self.norm_2(hidden)))
        features: Tensor = self.short(x) + hidden
        return features


class Larger(nn.Module):
    """Twice the resolution."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Features of twice the resolution."""
        larger: Tensor = self.conv(F.interpolate(x, scale_factor=2.0))
        return larger


class UNet(nn.Module):
    """Residual blocks with a skip each, as in Ho et al., "Denoising Diffusion Probabilistic Models", 2020."""

    def __init__(self, widths: Sequence[int], each: int, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for width, following in zip(widths, (*widths[1:], 0), strict=True):
            self.down += [Residual(width, width) for _ in range(each)]
            if following:
                self.down.append(nn.Conv2d(width, following, 3, stride=2, padding=1))
        self.middle = Residual(widths[-1], widths[-1])
        for width, following in zip(widths[::-1], (*widths[-2::-1], 0), strict=True):
            self.up += [Residual(2 * width, width) for _ in range(each)]
            if following:
                self.up.append(Larger(width, following))
        self.head = nn.Conv2d(widths[0], channels, 3, padding=1)

    def self_balance(self) -> list[nn.Module]:
        """Every residual block and every change of resolution is a block."""
        return [self.stem, *self.down, self.middle, *self.up, self.head]

    def forward(self, x: Tensor) -> Tensor:
        """An image of the same size."""
        x, skips = self.stem(x), []
        for block in self.down:
            x = block(x)
            if isinstance(block, Residual):
                skips.append(x)
        x = self.middle(x)
        for block in self.up:
            x = block(x, skips.pop()) if isinstance(block, Residual) else block(x)
        image: Tensor = self.head(x)
        return image


class Layer(nn.Module):
    """A transformer layer that joins a skip in front."""

    def __init__(self, width: int, *, joins: bool = False) -> None:
        super().__init__()
        self.join = nn.Linear(2 * width, width) if joins else None
        self.layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """Tokens of the same width."""
        if self.join is not None and skip is not None:
            x = self.join(torch.cat([x, skip], -1))
        tokens: Tensor = self.layer(x)
        return tokens


class UVit(nn.Module):
    """Long skips between layers of one width, as in Bao et al., "All are Worth Words", 2023."""

    def __init__(self, depth: int = 12, width: int = 512) -> None:
        super().__init__()
        self.down = nn.ModuleList(Layer(width) for _ in range(depth))
        self.middle = Layer(width)
        self.up = nn.ModuleList(Layer(width, joins=True) for _ in range(depth))

    def self_balance(self) -> list[nn.Module]:
        """Every layer is a block."""
        return [*self.down, self.middle, *self.up]

    def forward(self, x: Tensor) -> Tensor:
        """Tokens of the same width."""
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
        x = self.middle(x)
        for layer in self.up:
            x = layer(x, skips.pop())
        return x


@dataclass(frozen=True)
class Case:
    """A model and its batch."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]


CASES = (
    # Widths and size of Rombach et al., "High-Resolution Image Synthesis with Latent Diffusion Models", 2022.
    Case(
        "U-Net of 320 to 1280 channels, latents of 64 x 64",
        lambda: UNet((320, 640, 1280, 1280), 2, channels=4),
        lambda: torch.randn(4, 4, 64, 64),
    ),
    Case(
        "U-Net of 64 to 512 channels, images of 256 x 256",
        lambda: UNet((64, 128, 256, 512), 2),
        lambda: torch.randn(8, 3, 256, 256),
    ),
    Case("U-ViT, 25 layers", UVit, lambda: torch.randn(8, 256, 512)),
    Case(
        "U-Net that joins outside its blocks",
        lambda: JoinedOutside((64, 128, 256, 512)),
        lambda: torch.randn(8, 3, 256, 256),
    ),
)


class Cuts:
    """All ways to cut a chain: the peaks of their stages, and what they move."""

    def __init__(self, profile: Profile, units: Units, crossings: Sequence[Crossing]) -> None:
        self._profile, self._units = profile, units
        last = len(profile.blocks) - 1
        with_root = [(*unit, ROOT) if last in unit else tuple(unit) for unit in units]
        self._received = received(crossings, with_root, profile.training)
        self._last_unit = next(number for number, unit in enumerate(units) if last in unit)
        self._peaks: dict[tuple[int, int], int] = {}

    def peak(self, start: int, stop: int) -> int:
        """Bytes of a device that holds a stage."""
        if (start, stop) not in self._peaks:
            inside = {block for unit in self._units[start:stop] for block in unit}
            assignment = [0 if block in inside else 1 for block in range(len(self._profile.blocks))]
            root = 0 if start <= self._last_unit < stop else 1
            self._peaks[start, stop] = replay(self._profile.timeline, assignment, root, 2)[0]
        return self._peaks[start, stop]

    def least_peak(self, devices: int) -> float:
        """The best balance."""
        return self._best(devices, self.peak, max)[0]

    def fewest_bytes(self, devices: int, limit: float) -> tuple[int, ...]:
        """The assignment that moves least of those whose peaks are within a limit."""

        def moved(start: int, stop: int) -> float:
            return float(self._received[start, stop]) if self.peak(start, stop) <= limit else float("inf")

        cuts = self._best(devices, moved, lambda one, other: one + other)[1]
        places = enumerate(pairwise(cuts))
        device_of = {block: at for at, (start, stop) in places for unit in self._units[start:stop] for block in unit}
        return tuple(device_of[block] for block in range(len(device_of)))

    def _best(
        self, devices: int, cost: Callable[[int, int], float], combine: Callable[[float, float], float]
    ) -> tuple[float, tuple[int, ...]]:
        count = len(self._units)
        best: dict[int, tuple[float, tuple[int, ...]]] = {count: (0.0, (count,))}
        for left in range(devices):
            first = range(count) if left < devices - 1 else range(1)
            best = {
                start: min(
                    (combine(cost(start, stop), value), (start, *cuts))
                    for stop, (value, cuts) in best.items()
                    if stop > start
                )
                for start in first
                if any(stop > start for stop in best)
            }
        return best[0]


def compare(case: Case, devices_of: Sequence[int]) -> list[float]:
    """Print one model's lines, and return how many times less its plans move; 0 for a plan in call order."""
    profile = autobalance.profile(case.build(), case.batch(), optimizer=torch.optim.AdamW, target=TARGET)
    crossings, count = crossings_of(profile), len(profile.blocks)
    units = folded_units(count, crossings)
    print(f"\n{case.name}: {count} blocks, {format_size(profile.peak())} on one device", flush=True)
    if units is None:
        print("  folding does not help")
        return [0.0 for _ in devices_of]
    in_order = [(block,) for block in range(count)]
    chains = {"call order": Cuts(profile, in_order, crossings), "folded": Cuts(profile, units, crossings)}
    ratios = []
    for devices in devices_of:
        limit = SLACK * max(cuts.least_peak(devices) for cuts in chains.values())
        moved = {}
        for name, cuts in chains.items():
            assignment = cuts.fewest_bytes(devices, limit)
            moved[name] = tell(profile, crossings, name, assignment, assignment[-1], devices)
        capacity = int(1.02 * limit)
        plan = autobalance.plan(profile, [capacity] * devices)
        name = f"plan within {format_size(capacity)}"
        ratio = moved["call order"] / tell(profile, crossings, name, plan.assignment, plan.root, devices)
        ratios.append(ratio if len(plan.stages) > devices else 0.0)
        folded = moved["call order"] / moved["folded"]
        print(f"  {devices} devices: {folded:.2f} times fewer bytes folded, {ratio:.2f} times in the plan")
    return ratios


def tell(
    profile: Profile, crossings: Sequence[Crossing], name: str, assignment: Sequence[int], root: int, devices: int
) -> int:
    """Print one assignment, and return what it moves."""
    moved = sum(bytes_moved(crossings, assignment, root).values())
    peak = max(replay(profile.timeline, assignment, root, devices))
    places = "".join(map(str, assignment))
    print(f"  {name:26} moves {format_size(moved):>10}, largest peak {format_size(peak):>10}  {places}", flush=True)
    return moved


def main() -> int:
    """Compare all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4], help="how many (default: %(default)s)")
    parser.add_argument("--models", type=int, nargs="+", default=range(len(CASES)), help="numbers, from 0")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    ratios = [compare(CASES[number], options.devices) for number in options.models]
    return 0 if min(ratios[0]) >= 2 else 1


if __name__ == "__main__":
    raise SystemExit(main())
