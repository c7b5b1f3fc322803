from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import autobalance
from autobalance import Plan, Profile
from autobalance.partitioning.agreement import (
    batch_elements,
    refuse_larger_batch,
    refuse_other_devices,
    refuse_other_profile,
    refuse_other_weights,
)
from autobalance.profiling.fingerprint import differences, parts_of


def profile(head: int = 8, **other: object) -> Profile:
    """Two linear layers that are trained on batches of 8 samples."""
    made = Profile.from_costs(static=[4, head], names=["body", "head"])
    blocks = tuple(replace(block, kind="Linear", dtype="float32") for block in made.blocks)
    fields = {"signature": "x=float32[8,3]", "optimizers": ("AdamW",), **other}
    return replace(made, blocks=blocks, **fields)


def plan_of(made: Profile) -> Plan:
    return autobalance.plan(made, [16, 16], policy="balanced")


def test_a_fingerprint_tells_its_parts() -> None:
    here = profile()
    assert parts_of(here.fingerprint)["batch"] == "x=float32[8,3]"
    assert differences(here.fingerprint, profile().fingerprint) == {}
    assert differences(here.fingerprint, profile(precision="bf16-mixed").fingerprint) == {
        "precision": ("32-true", "bf16-mixed")
    }
    assert list(differences(here.fingerprint, profile(head=9).fingerprint)) == ["model"]
    assert differences("", here.fingerprint) == {}


def test_a_saved_plan_is_refused_where_model_batch_optimizer_or_precision_differ(tmp_path: Path) -> None:
    plan_of(profile()).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    refuse_other_profile(plan, profile())
    with pytest.raises(ValueError, match=r"batch 'x=float32\[8,3\]', not 'x=float32\[16,3\]', as in the profile"):
        refuse_other_profile(plan, profile(signature="x=float32[16,3]"))
    with pytest.raises(ValueError, match="optimizer 'AdamW', not 'SGD'; precision '32-true', not 'bf16-true'"):
        refuse_other_profile(plan, profile(optimizers=("SGD",), precision="bf16-true"))
    with pytest.raises(ValueError, match=r"other blocks: 'head' \(Linear, 8 B of weights, in place of Linear, 9 B\)"):
        refuse_other_profile(plan, profile(head=9))
    with pytest.raises(ValueError, match="the plan lacks 'a', 'b'; the profile lacks 'body', 'head'"):
        refuse_other_profile(plan, Profile.from_costs(static=[4, 8], names=["a", "b"]))
    with pytest.raises(ValueError, match="whose blocks are tied otherwise"):
        refuse_other_profile(plan, profile(together=((0, 1),)))


def test_a_plan_is_scored_as_it_stands_and_only_for_its_profile() -> None:
    plan = plan_of(profile())
    assert autobalance.score(profile(), plan).peaks == plan.peaks == (4, 8)
    assert autobalance.score(profile(), plan, [4, 4]).uses == (1.0, 2.0)
    with pytest.raises(ValueError, match="precision"):
        autobalance.score(profile(precision="16-mixed"), plan)


def test_other_weights_are_refused_where_the_plan_knows_them() -> None:
    plan = plan_of(profile())
    refuse_other_weights(plan, {"body": (4, 4), "head": (6, 512)})
    with pytest.raises(ValueError, match="block 'head' has 8 B of weights there of float32, but 16 B in this model"):
        refuse_other_weights(plan, {"body": (4, 4), "head": (16, 512)})
    refuse_other_weights(plan_of(Profile.from_costs(static=[4, 8])), {"block0": (16, 512)})


def test_devices_with_less_than_a_plan_needs_are_refused() -> None:
    plan = plan_of(profile())
    refuse_other_devices(plan, [("cuda:0", 4), ("cuda:1", 8)])
    refuse_other_devices(plan, [("cuda:0", 12), ("cuda:0", 12)])
    refuse_other_devices(plan, [("cpu", None), ("cpu", None)])
    with pytest.raises(ValueError, match=r"it needs 8 B of cuda:1, which has 7 B \(it was made for .* up to 16 B\)"):
        refuse_other_devices(plan, [("cuda:0", 16), ("cuda:1", 7)])
    with pytest.raises(ValueError, match="it needs 12 B of cuda:0, which has 11 B"):
        refuse_other_devices(plan, [("cuda:0", 11), ("cuda:0", 11)])


def test_a_larger_batch_is_refused_where_the_plan_knows_its_own() -> None:
    plan = plan_of(profile())
    assert batch_elements(plan) == 24
    refuse_larger_batch(plan, "x=float32[8,3]")
    refuse_larger_batch(plan, "x=float32[4,3]")
    with pytest.raises(ValueError, match=r"here they are of x=float32\[9,3\], 27 elements in place of 24"):
        refuse_larger_batch(plan, "x=float32[9,3]")
    by_hand = plan_of(Profile.from_costs(static=[4, 8]))
    assert batch_elements(by_hand) == 0
    refuse_larger_batch(by_hand, "x=float32[9,3]")
