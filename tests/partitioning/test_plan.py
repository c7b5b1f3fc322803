from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from autobalance.devices.device import Device
from autobalance.partitioning.plan import Plan, relative_use
from autobalance.partitioning.search import plan
from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.timeline import ROOT, Timeline


@pytest.fixture
def small() -> Plan:
    blocks = (BlockCost("embed+norm", weights=4), BlockCost("layers.0", weights=4), BlockCost("head", weights=4))
    timeline = Timeline((4, 4, 4, 1), (0, 1, 2, ROOT), (-1,) * 4, (1, 2, 3, 4))
    profile = Profile(blocks, timeline, loose=(("positions", 0), ("loss", ROOT)), batch="training batch of 8")
    return plan(profile, [10, 10])


def test_the_device_map_names_every_module_and_loose_tensor(small: Plan) -> None:
    assert small.assignment == (0, 0, 1)
    assert small.device_map == {"embed": 0, "norm": 0, "layers.0": 0, "head": 1, "positions": 0, "loss": 1}


def test_blocks_uses_and_fit(small: Plan) -> None:
    assert small.block_names == ("embed+norm", "layers.0", "head")
    assert small.blocks_on(0) == (0, 1)
    assert small.peaks == (8, 5)
    assert small.uses == (0.8, 0.5)
    assert small.fits


def test_peaks_of_an_installed_trace_replace_the_forecast(small: Plan) -> None:
    measured = small.with_peaks([9, 11], notes=["peaks of the installed trace"])
    assert (measured.peaks, measured.notes) == ((9, 11), ("peaks of the installed trace",))
    assert not measured.fits
    assert small.peaks == (8, 5)


def test_a_saved_plan_is_the_same_when_read(small: Plan, tmp_path: Path) -> None:
    small.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == small
    assert pickle.loads(pickle.dumps(small)) == small


def test_another_file_or_version_is_refused(small: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"kind": "profile"}')
    with pytest.raises(ValueError, match="is not a plan saved by autobalance"):
        Plan.load(path)
    small.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 0}))
    with pytest.raises(ValueError, match="another version of autobalance; make the plan again"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"assignment": (0,)}, "assigns 1 blocks, but has rows for 3"),
        ({"assignment": (0, 0, 2)}, "on a device outside 0 to 1"),
        ({"root": 5}, "on a device outside 0 to 1"),
        ({"loose": (("scale", 3),)}, "'scale', which is loose, has the owner 3, but there are 3 blocks"),
        ({"peaks": (1,)}, "2 devices, but 2 budgets and 1 peaks"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(small: Plan, fields: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(small, **fields)


def test_use_of_a_device_that_may_hold_nothing() -> None:
    assert relative_use(0, 0) == 0
    assert relative_use(1, 0) == float("inf")


def test_printing_a_plan_gives_its_table(small: Plan) -> None:
    text = str(small)
    assert "3 blocks on 2 devices, policy auto, batch: training batch of 8" in text
    assert "80.0%" in text


def test_devices_keep_their_names(small: Plan) -> None:
    named = plan(Profile.from_costs([1]), [Device("cuda:1", 10)])
    assert named.devices[0].name == "cuda:1"
