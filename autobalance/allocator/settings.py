"""Settings of CUDA's caching allocator, as `PYTORCH_CUDA_ALLOC_CONF` writes them.

Options and their bounds: c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.cpp.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from autobalance.allocator.rounding import INTERVALS, LARGE_SEGMENT, MIB, SHARED_LARGE

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables, the first that is set counts."""
# They concern pinned memory on the host, locks, graphs or error messages, none of which changes what a device reserves.
_WITHOUT_EFFECT = {
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_free_catch_all",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
}


@dataclass(frozen=True)
class AllocatorSettings:
    """What can be set of the allocator, where it changes what a device reserves.

    Example:
        >>> AllocatorSettings(expandable_segments=True)

    Attributes:
        max_split_size: blocks of at least so many bytes are not split; None: all may be.
        max_non_split_rounding: bytes by which such a block may exceed a request that it serves.
        roundup_power2_divisions: as `block_size` takes them; empty: off.
        garbage_collection_threshold: share of the limit from which unused segments are given back; 0: never. It does
            nothing without a limit, so it needs `memory_fraction` below 1.
        expandable_segments: one growing segment for each pool instead of many.
        large_segment: bytes of a segment that requests of 1 to 10 MiB share, and of a page of a growing one.
        memory_fraction: share of the device that the process may take; 1: no limit.
    """

    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_SEGMENT
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    large_segment: int = LARGE_SEGMENT
    memory_fraction: float = 1.0


def settings_from_environment(environment: Mapping[str, str] = os.environ) -> AllocatorSettings:
    """The settings that torch would take from the environment.

    Example:
        >>> settings_from_environment({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})

    Args:
        environment: variables by name.

    Raises:
        ValueError: as `parse_settings`.
    """
    name = next((name for name in VARIABLES if environment.get(name)), None)
    if name is None:
        return AllocatorSettings()
    try:
        return parse_settings(environment[name])
    except ValueError as error:
        raise ValueError(f"{name}={environment[name]!r}: {error}") from error


def parse_settings(text: str) -> AllocatorSettings:
    """Read settings as `PYTORCH_CUDA_ALLOC_CONF` writes them.

    Example:
        >>> parse_settings("max_split_size_mb:128,expandable_segments:True")

    Args:
        text: `option:value` pairs between commas.

    Raises:
        ValueError: an option that does not exist, a value that torch would refuse, or a backend other than `native`.
    """
    found: dict[str, Any] = {}
    text = re.sub(r"\s", "", text)
    for option, value in _pairs(text):
        if option in _READERS:
            field, read = _READERS[option]
            found[field] = read(option, value)
        elif option == "backend":
            if value != "native":
                raise ValueError(
                    f"backend:{value} is not PyTorch's caching allocator, and how it rounds and caches is not known; "
                    f"remove the option, or look at allocated instead of reserved bytes"
                )
        elif option not in _WITHOUT_EFFECT:
            near = get_close_matches(option, [*_READERS, *_WITHOUT_EFFECT, "backend"], 1)
            raise ValueError(
                f"{option!r} is no option of the allocator"
                + (f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(_READERS))}")
            )
    settings = AllocatorSettings(**found)
    if settings.max_split_size is not None and settings.max_split_size < settings.large_segment:
        raise ValueError(
            f"max_split_size_mb:{settings.max_split_size // MIB} is too small; it must be at least "
            f"{settings.large_segment // MIB}, the size of a segment"
        )
    return settings


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\]?)?", text):
        option, colon, value = part.partition(":")
        if not colon or not value:
            raise ValueError(f"{part!r} is no pair of option and value, such as 'expandable_segments:True'")
        pairs.append((option, value))
    return pairs


def _megabytes(option: str, value: str) -> int:
    return _whole(option, value) * MIB


def _segment(option: str, value: str) -> int:
    size = _megabytes(option, value)
    if size <= SHARED_LARGE:
        raise ValueError(f"{option}:{value} is too small; it must be more than {SHARED_LARGE // MIB}")
    return size


def _whole(option: str, value: str) -> int:
    if not value.isdecimal():
        raise ValueError(f"{option}:{value} is no whole number")
    return int(value)


def _share(option: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 < share < 1 and not (option == "per_process_memory_fraction" and 0 <= share <= 1):
        raise ValueError(f"{option}:{value} is no share of memory, a number between 0 and 1")
    return share


def _truth(option: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{option}:{value} must be True or False")
    return value == "True"


def _divisions(option: str, value: str) -> tuple[int, ...]:
    """Entries for each power of two: of a single number all are it; a list names powers of two in MiB.

    What lies below the first power is like it; what lies between two of them is not rounded; `>` names all above.
    """
    if not value.startswith("["):
        return (_power(option, value),) * INTERVALS
    if not value.endswith("]"):
        raise ValueError(f"{option}:{value} lacks its closing bracket")
    entries, last = [0] * INTERVALS, -1
    for part in value[1:-1].split(","):
        boundary, colon, number = part.partition(":")
        if not colon:
            raise ValueError(f"{option}:{value}: {part!r} is no pair, such as 256:4")
        steps = 0 if number == "0" else _power(option, number)
        if boundary == ">":
            entries[last + 1 :] = [steps] * (INTERVALS - last - 1)
            continue
        index = min(_power(option, boundary).bit_length() - 1, INTERVALS - 1)
        if last < 0:
            entries[:index] = [steps] * index
        entries[index], last = steps, index
    return tuple(entries)


def _power(option: str, value: str) -> int:
    number = _whole(option, value)
    if number < 1 or number & (number - 1):
        raise ValueError(f"{option}: {value} is no power of two")
    return number


_READERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "max_split_size_mb": ("max_split_size", _megabytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _megabytes),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share),
    "expandable_segments": ("expandable_segments", _truth),
    "large_segment_size_mb": ("large_segment", _segment),
    "per_process_memory_fraction": ("memory_fraction", _share),
}
