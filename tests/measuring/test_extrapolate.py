"""Figures of a whole batch from those of parts, and outputs put together from parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autobalance.measuring.call import Call
from autobalance.measuring.extrapolate import batch_size, forward_in_parts, measured_or_extrapolated, sliced
from autobalance.measuring.passes import Passes


def call(samples: int) -> Call:
    lengths = torch.arange(samples)
    return Call("forward", (lengths, torch.ones(samples, 3)), {"mask": torch.ones(1, 3), "scale": 2, "pair": [lengths]})


def run_up_to(most: int) -> Any:
    """Takes 100 bytes and 7 a sample, and runs out of memory with more than `most` samples."""

    def run(part: Call) -> Passes:
        samples = batch_size(part)
        if samples > most:
            raise torch.OutOfMemoryError("too much")
        return Passes(saved=100 + 7 * samples, forward_time=1.0 + 0.5 * samples, trains=(True,))

    return run


def test_samples_are_the_rows_of_the_first_floating_tensor() -> None:
    assert batch_size(call(6)) == 6
    assert batch_size(Call("forward", (torch.arange(4),), {})) == 4
    assert batch_size(Call("forward", (3, torch.tensor(1.0)), {})) == 1
    part = sliced(call(6), 2, 4)
    assert part.args[0].tolist() == [2, 3]
    assert (tuple(part.args[1].shape), tuple(part.kwargs["mask"].shape)) == ((2, 3), (1, 3))
    assert part.kwargs["pair"][0].tolist() == [2, 3]


def test_what_fits_is_run_as_it_is() -> None:
    found, samples, notes = measured_or_extrapolated(call(8), run_up_to(8), "a GPU")
    assert (found.saved, samples, notes) == (156, 8, ())


@pytest.mark.parametrize(("most", "few", "many"), [(9, 4, 8), (4, 2, 4), (3, 1, 2)])
def test_affine_figures_are_found_from_two_smaller_batches(most: int, few: int, many: int) -> None:
    found, samples, notes = measured_or_extrapolated(call(16), run_up_to(most), "a GPU")
    assert (found.saved, found.forward_time, found.trains) == (100 + 7 * 16, 9.0, (True,))
    assert samples == many
    assert notes == (
        f"16 samples did not fit on a GPU: figures are extrapolated from those of {few} and {many} samples",
    )


def test_a_single_sample_that_fits_is_multiplied() -> None:
    found, samples, notes = measured_or_extrapolated(call(16), run_up_to(1), "a GPU")
    assert (found.saved, samples) == (16 * 107, 1)
    assert notes == ("16 samples did not fit on a GPU: figures are 16 times those of one sample",)


def test_a_single_sample_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="too much"):
        measured_or_extrapolated(call(16), run_up_to(0), "a GPU")


def test_outputs_of_parts_are_put_together() -> None:
    sizes: list[int] = []

    def forward(part: Call) -> dict[str, Any]:
        x: Tensor = part.args[0] * 2
        sizes.append(len(x))
        return {"doubled": x, "constant": torch.ones(3), "text": "kept"}

    whole = forward_in_parts(call(7), 3, forward)
    assert sizes == [3, 3, 1]
    assert whole["doubled"].tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert (whole["constant"].tolist(), whole["text"]) == ([1, 1, 1], "kept")
