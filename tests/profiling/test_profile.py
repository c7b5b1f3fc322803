from __future__ import annotations

import json
from pathlib import Path

import pytest

from autobalance.allocator.settings import AllocatorSettings
from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.timeline import ROOT, Timeline


def test_the_textbook_peak_by_hand() -> None:
    profile = Profile.from_costs(static=[4, 3, 2], saved=[5, 1, 2], transient=[1, 9, 2])
    # Static 9. Forward: 9+1; 9+5+9 = 23; 9+6+2; then 9+8 saved. Backward: 17+2; then 15+9 = 24; then 14+1.
    assert profile.peak() == 24
    assert profile.peak(step=1) == 24


def test_a_row_tells_what_was_given() -> None:
    profile = Profile.from_costs(
        [4, 3], saved=[5, 1], forward_time=[0.5, 1], backward_time=[1, 2], transfer=[7], names=["embed", "head"]
    )
    assert profile.names == ("embed", "head")
    embed, head = profile.blocks
    assert (embed.static, embed.saved, embed.outputs, embed.forward_time) == (4, 5, 7, 0.5)
    assert (head.inputs, head.outputs, head.backward_time) == (7, 0, 2)


def test_fractions_of_a_byte_are_rounded_up() -> None:
    assert Profile.from_costs([1.2]).peak() == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"saved": [1]}, "saved has 1 entries, static has 2"),
        ({"names": ["a"]}, "names has 1 entries, static has 2"),
        ({"transient": [1, -2]}, "transient has the entry -2"),
        ({"names": ["a", "a"]}, "come twice: a"),
        ({"together": [(0, 2)]}, r"together=\(0, 2\) names a block that is not among the 2"),
    ],
)
def test_lists_that_do_not_match_are_refused(arguments: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Profile.from_costs([4, 3], **arguments)


@pytest.mark.parametrize("size", [-1, float("inf"), float("nan")])
def test_costs_are_finite_and_not_negative(size: float) -> None:
    with pytest.raises(ValueError, match=f"saved has the entry {size}; costs are finite and not negative"):
        Profile.from_costs([1, 1], saved=[0, size])


def test_owners_of_loose_tensors_must_exist() -> None:
    with pytest.raises(ValueError, match="'scale', which is loose, has the owner 1, but there are 1 blocks"):
        Profile((BlockCost("a"),), Timeline((), (), (), ()), loose=(("scale", 1),))


def test_a_profile_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        Profile.from_costs([])


def test_owners_must_exist() -> None:
    with pytest.raises(ValueError, match=r"owners \[1\], but there are 1 blocks"):
        Profile((BlockCost("a"),), Timeline((1,), (1,), (-1,), (1,)))


def test_a_saved_profile_is_the_same_when_read(tmp_path: Path) -> None:
    profile = Profile(
        (BlockCost("a+b", kind="Linear", weights=8, forward_time=0.25), BlockCost("c")),
        Timeline((8, 4), (0, ROOT), (-1, -1), (1, 2, -2), (("step 1 forward", 1),)),
        together=((0, 1),),
        loose=(("scale", ROOT),),
        batch="training batch of 4",
        target="simulated",
        optimizers=("AdamW",),
        notes=("a note",),
    )
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    assert hash(Profile.load(tmp_path / "profile.json")) == hash(profile)


def test_another_file_or_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="is not a profile saved by autobalance"):
        Profile.load(path)
    Profile.from_costs([1]).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    with pytest.raises(ValueError, match="another version of autobalance; make the profile again"):
        Profile.load(path)


def growing() -> Profile:
    """Two steps of a block with 100 B of weights and 10 B for each of 4 samples; the optimizer adds 200 B."""
    timeline = Timeline(
        sizes=(512, 512, 512),
        owners=(0,) * 3,
        values=(-1,) * 3,
        events=(1, 2, -2, 3, 2, -2),
        marks=(
            ("step 1 forward", 1),
            ("step 1 optimizer", 2),
            ("step 2 forward", 4),
            ("step 2 optimizer", 5),
            ("end", 6),
        ),
        fixed=(100, 0, 200),
        per_sample=(0, 10, 0),
    )
    return Profile(
        (BlockCost("a", weights=512, saved=512, forward_time=2.0),),
        timeline,
        batch="train batch of 4",
        batch_size=4,
        other_blocks=(BlockCost("a", weights=512, saved=1024, forward_time=3.0),),
        other_batch_size=8,
    )


def test_steps_after_the_last_are_like_the_last() -> None:
    profile = growing()
    assert (profile.peak(1), profile.peak(2), profile.peak(3), profile.peak(99)) == (1024, 1536, 1536, 1536)
    with pytest.raises(ValueError, match="has no step 0; its marks are: step 1 forward"):
        profile.peak(0)
    with pytest.raises(ValueError, match="has no step 1; its marks are: none"):
        Profile((BlockCost("a"),), Timeline((1,), (0,), (-1,), (1,))).peak(1)


def test_peaks_of_a_phase() -> None:
    profile = growing()
    assert profile.peak(1, phase="forward+backward") == 1024
    assert profile.peak(1, phase="optimizer") == 1024  # what the forward left lives at its start
    assert profile.peak(phase="forward+backward") == 1536


def test_a_scaled_profile_has_the_bytes_of_the_other_batch() -> None:
    profile = growing()
    # 100 B, 200 B and 10 B for each of 200 samples, in granules of 512 B.
    assert profile.peak(batch_size=200) == profile.scaled(200).peak() == 512 + 512 + 2048
    assert profile.peak(batch_size=4) == profile.peak()
    scaled = profile.scaled(16)
    assert (scaled.batch_size, scaled.batch) == (16, "train batch of 4, with 16 samples in place of 4")
    row = scaled.blocks[0]
    assert (row.weights, row.saved, row.forward_time) == (512, 512 + 3 * 512, 5.0)
    assert scaled.scaled(4).blocks == profile.blocks
    assert profile.scaled(8).blocks == profile.other_blocks
    assert profile.scaled(8).scaled(16).blocks == scaled.blocks
    with pytest.raises(ValueError, match="batch_size=0; a batch has at least one sample"):
        profile.peak(batch_size=0)


def test_a_profile_of_one_batch_size_says_why_it_cannot_be_scaled() -> None:
    profile = Profile(
        (BlockCost("a"),), Timeline((1,), (0,), (-1,), (1,)), batch="a graph", notes=("the batch has no samples",)
    )
    with pytest.raises(ValueError, match=r"made with \(a graph\): how bytes .* say: the batch has no samples"):
        profile.scaled(3)


MIB = 2**20


def cached() -> Profile:
    """Two blocks of 12 MiB each, then a transient of 14 MiB once that of 12 MiB is gone."""
    timeline = Timeline(
        sizes=tuple(size * MIB for size in (12, 12, 12, 14)),
        owners=(0, 1, 0, ROOT),
        values=(-1,) * 4,
        events=(1, 2, 3, -3, 4),
        marks=(("step 1 forward", 2), ("step 1 optimizer", 4)),
    )
    return Profile((BlockCost("a"), BlockCost("b")), timeline)


def test_reserved_bytes_stay_reserved() -> None:
    profile = cached()
    assert (profile.peak(), profile.peak(reserved=True)) == (38 * MIB, 50 * MIB)
    assert profile.peak(1, phase="forward+backward", reserved=True) == 36 * MIB


def test_settings_of_the_allocator_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert cached().peak(reserved=True) == 40 * MIB  # two pages
    assert cached().peak(reserved=True, settings=AllocatorSettings()) == 50 * MIB


def test_a_device_fits_what_its_allocator_can_serve() -> None:
    assert cached().fits("38 MiB")  # the cached 12 MiB are given back for the last request
    assert not cached().fits("37 MiB")


def test_the_cpu_reserves_nothing() -> None:
    profile = Profile((BlockCost("a"),), Timeline((3,), (0,), (-1,), (1,)), target="cpu", granule=1)
    with pytest.raises(ValueError, match="of 'cpu', which has no caching allocator"):
        profile.peak(reserved=True)
