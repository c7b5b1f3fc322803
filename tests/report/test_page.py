from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autobalance.devices.device import Device
from autobalance.partitioning.plan import Plan
from autobalance.partitioning.stage import Stage
from autobalance.profiling.profile import Profile
from autobalance.report.page import page

GIB = 2**30
Reader = Callable[[str], Any]


def test_memory_is_stacked_against_the_budget(pipelined: Plan, elements: Reader) -> None:
    read = elements(page(pipelined, None))
    # The longest strip is the budget of 16 GiB. Device 0: 2 + 2 + 4 + 4 + 0.5 GiB, device 1: 2 + 2 + 4 + 2 + 0.5.
    assert read.bars("weights") == [("0%", "12.5%"), ("0%", "12.5%")]
    assert read.bars("gradients") == [("12.5%", "12.5%"), ("12.5%", "12.5%")]
    assert read.bars("optimizer") == [("25%", "25%"), ("25%", "25%")]
    assert read.bars("saved") == [("50%", "25%"), ("50%", "12.5%")]
    assert read.bars("rest") == [("75%", "3.125%"), ("62.5%", "3.125%")]
    assert "device 0, gradients: 2.00 GiB (2,147,483,648 B)" in read.texts("title")
    assert "12.50 / 16.00 GiB, 78.1%" in read.texts("div", "figure")


def test_time_is_shown_slot_by_slot(pipelined: Plan, elements: Reader) -> None:
    read = elements(page(pipelined, None))
    titles = read.texts("title")
    # The second forward of the second stage waits for its first backward, which ends at 2 x (25 + 100) + 200 ms.
    assert "forward of micro-batch 1: 450 ms to 575 ms, 125 ms, of which 25.0 ms of transfers" in titles
    assert "backward of micro-batch 1: 800 ms to 1.00 s, 200 ms" in titles
    assert ("47.5%", "10%") in read.bars("forward")
    assert ("80%", "20%") in read.bars("backward")
    assert "busy 60%" in read.texts("div", "figure")
    assert "busy 70%" in read.texts("div", "figure")


def test_later_visits_of_a_device_are_told_from_first_ones(pipelined: Plan, elements: Reader) -> None:
    stages = tuple(Stage(block, block + 1, block % 2, 2, 0.125, 0.25) for block in range(4))
    looped = replace(pipelined, schedule="looped", assignment=(0, 1, 0, 1), stages=stages)
    read = elements(page(looped, None))
    # Device 0 is back at 0.25 and 0.375 s, and goes back through its first stage at 1.375 and 1.625 of 1.875 s.
    assert read.bars("forward again")[:2] == [("13.333%", "6.667%"), ("20%", "6.667%")]
    assert read.bars("backward")[:2] == [("73.333%", "13.333%"), ("86.667%", "13.333%")]
    assert "forward in a device's second stage" in read.texts("li")
    assert "backward in a device's second stage" in read.texts("li")
    assert "second stage" not in page(pipelined, None)


def test_memory_over_the_step_is_replayed_in_launch_order(pipelined: Plan, elements: Reader) -> None:
    read = elements(page(pipelined, pipelined.profile))
    figures = read.texts("div", "figure")
    # Static 8 GiB; saved 2 GiB for each of two and one micro-batches in flight; half a GiB inside a backward.
    assert "peak 12.50 GiB" in figures
    assert "peak 10.50 GiB" in figures
    assert "Memory over time" in read.texts("h2")


def test_bounds_are_a_waterfall(pipelined: Plan, elements: Reader) -> None:
    read = elements(page(pipelined, None))
    # 0.9 s, nothing more, 0.05 s more, 0.05 s more, of 1 s.
    assert read.bars("added") == [("0%", "90%"), ("90%", "0%"), ("90%", "5%"), ("95%", "5%")]
    assert "950 ms (+5.6%)" in read.texts("div", "figure")
    assert read.texts("b")[:2] == ["Fits", "Optimal"]


def test_equal_blocks_share_a_row(pipelined: Plan, elements: Reader) -> None:
    read = elements(page(pipelined, None))
    assert [cell for cell in read.texts("th") if "…" in cell] == ["embed … layers[0]", "layers<1> … head"]
    row = ["2", "0", "1.00", "1.00", "2.00", "1.00"]
    assert read.texts("td", "number")[:6] == row
    assert "Sizes of each block in GiB, for one micro-batch of 2 samples." in read.texts("p")


def test_a_plan_without_profile_or_times_says_so(pipelined: Plan) -> None:
    text = page(replace(pipelined, stages=(), step_time=0.0, bounds={}, profile=None), None)
    assert "plan.report(path, profile=profile)" in text
    assert "The plan has no times" in text
    assert "The plan tells no bounds" in text


def test_what_does_not_fit_alarms(pipelined: Plan, elements: Reader) -> None:
    read = elements(page(replace(pipelined, budgets=(10 * GIB, 16 * GIB)), None))
    assert read.texts("div", "figure over") == ["12.50 / 10.00 GiB, 125.0%"]
    assert read.texts("b")[0] == "Does not fit"


def test_parts_that_are_more_than_the_peak_are_explained(pipelined: Plan) -> None:
    words = "not all alive at one instant"
    assert words not in page(pipelined, None)
    assert words in page(replace(pipelined, peaks=(11 * GIB, 10 * GIB)), None)


def test_names_are_texts_and_nothing_is_loaded(pipelined: Plan, elements: Reader) -> None:
    odd = "</title><script src='https://x'>&"
    plan = replace(
        pipelined,
        blocks=tuple(replace(block, name=f"{odd}{index}", kind=odd) for index, block in enumerate(pipelined.blocks)),
        devices=(Device(odd, GIB), Device(odd, GIB)),
        batch=odd,
        notes=(odd,),
        advice=(odd,),
        bounds={odd: 1.0},
    )
    text = page(plan, None)
    read = elements(text)
    assert {name for name, _, _ in read.found}.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert odd in read.texts("li")
    attributes = {key for _, has, _ in read.found for key in has}
    assert attributes.isdisjoint({"src", "href", "style", "onload", "onclick"})
    assert "://" not in page(pipelined, pipelined.profile)
    assert "@import" not in text
    assert "url(" not in text


def test_many_blocks_devices_and_micro_batches_stay_readable(pipelined: Plan, elements: Reader) -> None:
    blocks = tuple(replace(pipelined.blocks[0], name=f"layers.{index}") for index in range(500))
    assignment = tuple(block * 16 // 500 for block in range(500))
    cuts = [next(block for block in range(500) if assignment[block] == device) for device in range(16)]
    stages = tuple(
        Stage(start, stop, device, 16 - device, 0.1, 0.2)
        for device, (start, stop) in enumerate(zip(cuts, [*cuts[1:], 500], strict=True))
    )
    plan = replace(
        pipelined,
        blocks=blocks,
        assignment=assignment,
        stages=stages,
        devices=tuple(Device("A100", GIB) for _ in range(16)),
        budgets=(500 * GIB,) * 16,
        peaks=(100 * GIB,) * 16,
        micro_batches=128,
        profile=None,
    )
    text = page(plan, None)
    read = elements(text)
    assert len(text) < 400_000
    assert len(read.found) < 2_000
    assert len([cell for cell in read.texts("th") if "layers." in cell]) == 16
    assert "4,096 stretches are too many to point at each" in text


def test_a_page_is_written_with_the_profile_of_the_plan(pipelined: Plan, tmp_path: Path) -> None:
    path = pipelined.report(tmp_path / "plan.html")
    assert ">peak 12.50 GiB<" in path.read_text(encoding="utf-8")
    pipelined.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert ">peak 12.50 GiB<" not in loaded.report(path).read_text(encoding="utf-8")
    assert ">peak 12.50 GiB<" in loaded.report(path, profile=pipelined.profile).read_text(encoding="utf-8")


def test_another_profile_is_refused(pipelined: Plan, tmp_path: Path) -> None:
    profile = pipelined.profile
    assert profile is not None
    shorter = Profile.from_costs([4] * 3, names=["embed", "layers", "head"])
    told = r"has 3 blocks \(embed, layers, head\), the plan 4 \(embed, layers\[0\], … head\): give the profile that"
    with pytest.raises(ValueError, match=told):
        pipelined.report(tmp_path / "plan.html", profile=shorter)
    plan = replace(pipelined, fingerprint=profile.fingerprint)
    with pytest.raises(ValueError, match=r"batch: batch of 8, .* is not the one .*batch: training batch of 4"):
        plan.report(tmp_path / "plan.html", profile=replace(profile, batch="batch of 8"))


def test_the_optimizer_on_the_host_is_in_the_value(pipelined: Plan, elements: Reader) -> None:
    read = elements(page(replace(pipelined, host_optimizer=(1,)), None))
    assert "1.00 s with the optimizer's step on the host" in read.texts("div", "figure")
    told = "step time 1.00 s with the optimizer's step on the host, less is impossible for plans of this kind"
    assert told in read.texts("span")


def test_weights_on_the_host_are_not_in_the_memory_of_a_device(pipelined: Plan, elements: Reader) -> None:
    figures = elements(page(replace(pipelined, streamed=(2, 3)), pipelined.profile)).texts("div", "figure")
    # Of 10.5 GiB on device 1, 8 are static.
    assert {"peak 12.50 GiB", "peak 2.50 GiB"} <= set(figures)


def test_a_wide_table_scrolls_inside_its_card_and_folds_its_words(pipelined: Plan, elements: Reader) -> None:
    marked = replace(pipelined, saving=("recompute",) * 4, streamed=(0, 1, 2, 3))
    text = page(marked, None)
    assert set(elements(text).texts("td", "words")) == {"recomputed, weights on the host"}
    assert '<div class="frame" tabindex="0"><table>' in text
    assert ".frame { overflow: auto;" in text
    assert ".words { white-space: normal;" in text


def test_dotted_lines_are_explained(pipelined: Plan) -> None:
    assert "a phase begins at each dotted line" in page(pipelined, pipelined.profile)
