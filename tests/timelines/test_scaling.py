from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autobalance
from autobalance.blocks import find_blocks
from autobalance.profiling.batches import with_samples
from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.timeline import Timeline
from autobalance.profiling.trial import Batch, PlainTrial
from autobalance.timelines.scaling import lines_through, other_sizes, unscaled, with_batch_sizes
from tests.models import BATCH, CASES
from tests.profiling.running import training_step


def profile_with(model: nn.Module, data: Any, step: Any = training_step) -> Profile:
    trial = PlainTrial(lambda parameters: torch.optim.AdamW(parameters, foreach=True), step)
    return Profiler(model, find_blocks(model), trial, [Batch("train batch", "train", data)]).profile()


@pytest.mark.parametrize("name", CASES)
def test_a_scaled_profile_equals_a_trace_at_that_size(name: str) -> None:
    case = CASES[name]
    model, data = case.make(nn.Module), case.batches(1)[0]

    def profile_at(samples: int) -> Profile:
        return profile_with(model, with_samples(data, samples))

    scalable = with_batch_sizes(profile_at(BATCH), BATCH, profile_at)
    assert scalable.notes == ()
    for samples in (5, 100):
        fresh, scaled = profile_at(samples), scalable.scaled(samples)
        assert scaled.timeline.sizes == fresh.timeline.sizes
        for phase in ("forward+backward", "optimizer"):
            assert scalable.peak(2, phase=phase, batch_size=samples) == fresh.peak(2, phase=phase)
        for column in ("weights", "gradients", "optimizer", "buffers", "backward_time", "forward_time"):
            of_scaled = [getattr(block, column) for block in scaled.blocks]
            assert of_scaled == pytest.approx([getattr(block, column) for block in fresh.blocks], rel=0.05), column


def test_a_batch_of_one_is_compared_with_two_and_three() -> None:
    assert other_sizes(1) == (2, 3)
    assert other_sizes(8) == (16, 24)


class Turned(nn.Module):
    """Turns samples and tokens around: of one sample, that is no copy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).transpose(0, 1).contiguous() ** 2)


def test_larger_batches_are_known_where_one_sample_takes_another_way() -> None:
    model = Turned()

    def profile_at(samples: int) -> Profile:
        return profile_with(model, torch.zeros(samples, 32, 16), lambda model, x: model(x).sum())

    scalable = with_batch_sizes(profile_at(1), 1, profile_at)
    assert len(profile_at(2).timeline.sizes) != len(scalable.timeline.sizes)
    assert scalable.notes == ()
    for samples in (1, 2, 7):
        assert scalable.peak(2, batch_size=samples) == profile_at(samples).peak(2)
    assert scalable.scaled(7).timeline.sizes == profile_at(7).timeline.sizes


class Sorting(nn.Module):
    """Takes room for more than 40 rows at once, as some kernels do from a number of rows on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y if len(x) <= 40 else y + y.abs().exp())


@pytest.mark.parametrize("size", [16, 24])
def test_larger_batches_are_known_beyond_a_number_of_rows(size: int) -> None:
    model = Sorting()

    def profile_at(samples: int) -> Profile:
        return profile_with(model, torch.zeros(samples, 16), lambda model, x: model(x).sum())

    scalable = with_batch_sizes(profile_at(size), size, profile_at)
    first = 48 if size == 16 else 2 * size
    assert f"batches of {first} samples and more take another way through the step than {size} (" in scalable.notes[0]
    for samples in (size, 48, 100):
        assert scalable.peak(2, batch_size=samples) == profile_at(samples).peak(2)
    with pytest.raises(ValueError, match="how bytes depend on the number of samples is not known"):
        scalable.peak(batch_size=size // 2)


class Similar(nn.Module):
    """Compares all samples with one another, as contrastive losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def self_balance(self) -> list[str]:
        return ["first", "second"]

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return x @ x.T


class Choosy(Similar):
    """Runs an operation more for every eight samples."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        for _ in range(len(x) // 8):
            x = torch.relu(x)
        return x


class Fussy(Similar):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.view(8, 4)))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            Similar,
            r"storage \d+ does not grow evenly: 256 bytes with 8 samples, 1024 bytes with 16 samples, 2304 bytes",
        ),
        (Choosy, r"with 16 samples the step does something else than with 8: \d+ storages instead of \d+"),
        (Fussy, r"the step does not run with 16 samples \(RuntimeError: .*shape"),
    ],
)
def test_bytes_that_are_no_line_are_not_guessed(model: type[nn.Module], reason: str) -> None:
    made, data = model(), torch.zeros(8, 4)

    def step(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).sum()

    profile = profile_with(made, data, step)
    scaled = with_batch_sizes(profile, 8, lambda samples: profile_with(made, with_samples(data, samples), step))
    with pytest.raises(ValueError, match=f"is not known.*bytes as a function of the batch are not known: {reason}"):
        scaled.peak(batch_size=16)
    assert scaled.timeline == profile.timeline
    assert scaled.peak(batch_size=8) == profile.peak()


def timeline(*exact: int, events: tuple[int, ...] = (1, 2), owner: int = 0) -> Timeline:
    return Timeline(exact, (owner,) * len(exact), (-1,) * len(exact), events, fixed=exact)


def test_lines_by_hand() -> None:
    found = lines_through([timeline(100, 40), timeline(100, 80), timeline(100, 120)], [4, 8, 12])
    assert (found.fixed, found.per_sample) == ((100, 0), (0, 10))
    assert found.scaled(5, granule=1).sizes == (100, 50)


def test_what_grows_by_parts_of_elements_is_a_line_above_all_that_was_seen() -> None:
    seen = (16, 32, 56)  # of 4, 9 and 14 samples a mask selects each second, of 8 bytes
    found = lines_through([timeline(100, nbytes) for nbytes in (36, 72, 108)], [8, 16, 24])
    assert [found.scaled(size, granule=1).sizes[1] for size in (2, 8, 24)] == [10, 40, 120]
    found = lines_through([timeline(100, nbytes) for nbytes in seen], [4, 9, 14])
    for nbytes, samples in zip(seen, (4, 9, 14), strict=True):
        assert 0 <= found.scaled(samples, granule=1).sizes[1] - nbytes <= samples + 8


def test_scratch_whose_parts_are_rounded_is_a_line_above_all_that_was_seen() -> None:
    seen = (317440, 633856, 950784)  # 4 samples, 8, 12, of two buffers of 39,600 bytes a sample and two smaller ones
    traced = [replace(timeline(100, nbytes), scratch=(1,)) for nbytes in seen]
    found = lines_through(traced, [4, 8, 12])
    for nbytes, samples in zip(seen, (4, 8, 12), strict=True):
        assert 0 <= found.scaled(samples, granule=512).sizes[1] - nbytes <= 1024
    with pytest.raises(ValueError, match=r"storage 1 does not grow evenly: 317440 bytes with 4 samples"):
        lines_through([timeline(100, nbytes) for nbytes in seen], [4, 8, 12])
    squared = [replace(timeline(100, 10_000 * samples**2), scratch=(1,)) for samples in (4, 8, 12)]
    with pytest.raises(ValueError, match=r"storage 1 does not grow evenly: 160000 bytes with 4 samples"):
        lines_through(squared, [4, 8, 12])


def test_attention_of_any_length_can_be_scaled_with_the_kernels_of_cuda() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
    tokens = torch.zeros(4, 50, 64)
    scalable = autobalance.profile(model, tokens, target="A100-80GB", scalable=True)
    fresh = autobalance.profile(model, with_samples(tokens, 64), target="A100-80GB")
    assert scalable.notes == fresh.notes
    assert scalable.peak(batch_size=64) == pytest.approx(fresh.peak(), rel=1e-3)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (timeline(1, 1, events=(2, 1)), "births and deaths come in another order from event 0 on"),
        (timeline(1, 1, owner=-1), "storage 0 is charged to another owner"),
        (timeline(1, events=(1,)), "1 storages instead of 2"),
        (replace(timeline(1, 1), fixed=()), "a trace lacks the exact bytes"),
        (replace(timeline(1, 1), values=(-1, 0)), "storage 1 shares its tensor with others"),
        (replace(timeline(1, 1), marks=(("step 1 forward", 1),)), "its phases begin elsewhere"),
        (replace(timeline(1, 1), scratch=(1,)), "kernels take other scratch memory"),
        (replace(timeline(1, 1), wholes=(-1, 0)), "parts of tensors are copied"),
        (timeline(1, 2), "storage 1 does not grow evenly: 1 bytes with 4 samples, 2 bytes with 8 samples"),
    ],
)
def test_steps_that_differ_are_told_by_their_first_difference(other: Timeline, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        lines_through([timeline(1, 1), other], [4, 8])


def test_the_note_comes_last() -> None:
    profile = Profile((BlockCost("a"),), timeline(1, events=(1,)), notes=("first",))
    assert unscaled(profile, "so").notes == ("first", "bytes as a function of the batch are not known: so")
