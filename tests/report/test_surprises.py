from __future__ import annotations

from dataclasses import replace

from autobalance.profiling.holders import Holder, Parts
from autobalance.profiling.profile import Profile
from autobalance.report.surprises import certainty, surprises

MIB = 2**20
HOLDERS = (
    Holder(("head",), "weights", 60 * MIB, 0.5),
    Holder(("head",), "addmm 8x50257", 38 * MIB, 0.38),
    Holder(("layers.0", "layers.1"), "_foreach_sqrt", 20 * MIB, 0.2),
    Holder((), "_log_softmax 8x50257", 10 * MIB, 0.1),
    Holder(("embed",), "embedding 8x16", 8 * MIB, 0.08),
    Holder(("norm",), "native_layer_norm 8x16", MIB, 0.01),
)


def _profile(**changes: object) -> Profile:
    return replace(Profile.from_costs([4]), **changes)  # type: ignore[arg-type]  # fields of the dataclass


def test_the_three_largest_that_a_placement_by_weights_does_not_see_are_told() -> None:
    assert surprises(_profile(holders=HOLDERS)) == [
        "head: addmm 8x50257 holds 38% of the peak (38.00 MiB)",
        "layers.0 … layers.1 (2 blocks): what the optimizer's step takes for all parameters at once (fused=True takes "
        "none, foreach=False less) holds 20% of the peak (20.00 MiB)",
        "outside the blocks (batch, loss, glue): _log_softmax 8x50257 holds 10% of the peak (10.00 MiB)",
    ]


def test_what_is_expected_or_small_is_no_surprise() -> None:
    assert surprises(_profile(holders=(HOLDERS[0], HOLDERS[5]))) == []


def test_certainty_names_only_what_there_is() -> None:
    assert certainty(_profile(parts=Parts(exact=3 * MIB))) == "exact 3.00 MiB (tensors)"
    text = certainty(_profile(parts=Parts(3 * MIB, 2 * MIB, MIB)))
    assert "modelled 2.00 MiB (inside kernels and libraries, by formula)" in text
    assert "allowance 1.00 MiB (inside kernels, as measured on other models)" in text
