from __future__ import annotations

import pytest

from autobalance.allocator.rounding import MIB
from autobalance.allocator.settings import AllocatorSettings, parse_settings, settings_from_environment

# The text of torch's own test of its configuration, test/cpp/c10_cuda and c10/test/core/AllocatorConfig_test.cpp.
TEXT = (
    "max_split_size_mb:40,max_non_split_rounding_mb:30,garbage_collection_threshold:0.5,"
    "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],expandable_segments:True,"
    "pinned_use_background_threads:True"
)


def test_torchs_own_example() -> None:
    settings = parse_settings(TEXT)
    assert settings.max_split_size == 40 * MIB
    assert settings.max_non_split_rounding == 30 * MIB
    assert settings.garbage_collection_threshold == 0.5
    assert settings.expandable_segments
    # For 1 to 64 MiB, 128, 256, 512 and 1024 MiB, and above, as that test expects.
    assert settings.roundup_power2_divisions == (8,) * 7 + (2, 4, 2, 4) + (1,) * 5


def test_one_number_of_divisions_is_for_all_sizes() -> None:
    assert parse_settings("roundup_power2_divisions:4").roundup_power2_divisions == (4,) * 16


def test_spaces_and_options_that_concern_no_device_memory_do_not_matter() -> None:
    text = " pinned_num_register_threads:8, backend:native ,large_segment_size_mb: 32,per_process_memory_fraction:0.5"
    assert parse_settings(text) == AllocatorSettings(large_segment=32 * MIB, memory_fraction=0.5)
    assert parse_settings("") == AllocatorSettings()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("expandable_segment:True", "'expandable_segment' is no option of the allocator; did you mean 'expandable_seg"),
        ("colour:red", "'colour' is no option of the allocator; known are expandable_segments, garbage_"),
        ("expandable_segments:true", "expandable_segments:true must be True or False"),
        ("expandable_segments", "'expandable_segments' is no pair of option and value"),
        ("max_split_size_mb:10", "max_split_size_mb:10 is too small; it must be at least 20"),
        ("max_split_size_mb:-1", "max_split_size_mb:-1 is no whole number"),
        ("large_segment_size_mb:10", "large_segment_size_mb:10 is too small; it must be more than 10"),
        ("garbage_collection_threshold:1.0", "garbage_collection_threshold:1.0 is no share of memory"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions: 3 is no power of two"),
        ("roundup_power2_divisions:[64:8", r"roundup_power2_divisions:\[64:8 lacks its closing bracket"),
        ("roundup_power2_divisions:[64]", "'64' is no pair, such as 256:4"),
        ("roundup_power2_divisions:[48:8]", "roundup_power2_divisions: 48 is no power of two"),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync is not PyTorch's caching allocator"),
    ],
)
def test_what_torch_would_refuse_is_refused_in_words(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_settings(text)


def test_the_environment_is_asked_in_torchs_order() -> None:
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert settings_from_environment(both) == AllocatorSettings(max_split_size=64 * MIB)
    assert settings_from_environment({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}).expandable_segments
    assert settings_from_environment({}) == AllocatorSettings()
    with pytest.raises(ValueError, match="PYTORCH_ALLOC_CONF='x:1': 'x' is no option"):
        settings_from_environment({"PYTORCH_ALLOC_CONF": "x:1"})
