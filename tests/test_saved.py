from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autobalance.partitioning.plan import Plan
from autobalance.partitioning.search import plan
from autobalance.profiling.profile import Profile

Edit = Callable[[dict[str, Any]], object]


def _edited(data: Profile | Plan, path: Path, edit: Edit) -> Path:
    data.save(path)
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda data: data.pop("timeline"), "profile lacks timeline"),
        (lambda data: data.update(colour="red"), "profile has the unknown colour"),
        (lambda data: data.update(blocks=None), "profile.blocks is null, which is not a list"),
        (lambda data: data["blocks"][1].update(weights="4"), 'profile.blocks[1].weights is "4", which is not a whole'),
        (lambda data: data["blocks"].append("head"), 'profile.blocks[2] is "head", which is no set of fields'),
        (lambda data: data["timeline"].update(sizes=[1, 2]), "sizes, owners and values describe the same storages"),
        (lambda data: data["timeline"]["events"].append(1.5), "1.5, which is not a whole number"),
        (lambda data: data["timeline"].update(marks=[["step 1"]]), '["step 1"], which is not a list of 2'),
        (lambda data: data.update(training=1), "profile.training is 1, which is not true or false"),
    ],
)
def test_a_damaged_profile_is_told_by_file_and_field(edit: Edit, text: str, tmp_path: Path) -> None:
    path = _edited(Profile.from_costs([4, 4]), tmp_path / "mine.json", edit)
    with pytest.raises(ValueError, match=r"mine\.json is damaged, or was edited: ") as caught:
        Profile.load(path)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda data: data.update(assignment=[0, 7]), "on a device outside 0 to 1"),
        (lambda data: data.update(assignment=[0, "1"]), 'plan.assignment[1] is "1", which is not a whole number'),
        (lambda data: data.update(bounds=[1]), "plan.bounds is [1], which is not a set of names and values"),
        (lambda data: data["bounds"].update(area="low"), "plan.bounds['area'] is \"low\", which is not a number"),
        (lambda data: data["devices"][0].pop("capacity"), "plan.devices[0] lacks capacity"),
    ],
)
def test_a_damaged_plan_is_told_by_file_and_field(edit: Edit, text: str, tmp_path: Path) -> None:
    path = _edited(plan(Profile.from_costs([4, 4]), [8, 8]), tmp_path / "mine.json", edit)
    with pytest.raises(ValueError, match=r"mine\.json is damaged, or was edited: ") as caught:
        Plan.load(path)
    assert text in str(caught.value)


def test_a_plan_edited_by_hand_is_taken(tmp_path: Path) -> None:
    original = plan(Profile.from_costs([4, 4, 4]), [20, 20])
    path = _edited(original, tmp_path / "mine.json", lambda data: data.update(assignment=[0, 1, 1], step_time=1))
    assert (Plan.load(path).assignment, Plan.load(path).step_time) == ((0, 1, 1), 1.0)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00{"])
def test_what_is_not_json_is_told_by_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"mine\.json is not a plan saved by autobalance: it is not JSON"):
        Plan.load(tmp_path / "mine.json")


def deep() -> Profile:
    """A profile whose timeline is long enough to be packed."""
    return Profile.from_costs(static=[4] * 40, saved=[2**40] * 40)


def test_long_columns_are_packed_and_the_rest_stays_readable(tmp_path: Path) -> None:
    deep().save(tmp_path / "deep.json")
    content = json.loads((tmp_path / "deep.json").read_text())
    assert content["timeline"]["events"].startswith("zlib")
    assert content["blocks"][3]["name"] == "block3"
    assert content["timeline"]["marks"][0] == ["step 1 forward", 40]
    assert Profile.load(tmp_path / "deep.json") == deep()


def test_a_list_in_place_of_packed_text_is_taken(tmp_path: Path) -> None:
    columns = {"sizes": list(deep().timeline.sizes), "events": list(deep().timeline.events)}
    path = _edited(deep(), tmp_path / "mine.json", lambda data: data["timeline"].update(columns))
    assert Profile.load(path) == deep()


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda line: line.update(events="12"), "profile.timeline.events starts neither with 'zlib' nor with"),
        (lambda line: line.update(sizes=line["sizes"][:-8]), "profile.timeline.sizes is cut off, or has something"),
        (lambda line: line.update(sizes="zlib: !"), "profile.timeline.sizes cannot be unpacked"),
        (lambda line: line.update(values="zlib: AAAA"), "profile.timeline.values cannot be unpacked"),
        (lambda line: line.update(values=line["events"]), "sizes, owners and values describe the same storages"),
        (lambda line: line.update(marks="zlib: AAAA"), "profile.timeline.marks is"),
    ],
)
def test_damaged_packed_text_is_told_by_field(edit: Edit, text: str, tmp_path: Path) -> None:
    path = _edited(deep(), tmp_path / "mine.json", lambda data: edit(data["timeline"]))
    with pytest.raises(ValueError, match=r"mine\.json is damaged, or was edited: ") as caught:
        Profile.load(path)
    assert text in str(caught.value)
