from __future__ import annotations

from autobalance.allocator.replay import Replayed, replay_requests, requests_fit
from autobalance.allocator.settings import AllocatorSettings

MIB = 2**20


def test_peaks_of_bytes_in_use_and_of_reserved_bytes() -> None:
    requests = [(0, 12 * MIB), (0, -12 * MIB), (1, 14 * MIB), (2, 512)]
    assert replay_requests(requests) == Replayed(allocated=14 * MIB + 512, reserved=28 * MIB, retries=0)


def test_less_than_the_reserved_peak_fits_where_cached_memory_can_be_given_back() -> None:
    requests = [(0, 12 * MIB), (0, -12 * MIB), (1, 14 * MIB)]
    assert replay_requests(requests).reserved == 26 * MIB
    assert requests_fit(requests, 14 * MIB)
    assert not requests_fit(requests, 14 * MIB - 1)
    assert replay_requests(requests, 14 * MIB).retries == 1


def test_more_than_the_peak_in_use_is_needed_where_free_memory_lies_in_pieces() -> None:
    requests = [(key, 5 * MIB) for key in range(4)] + [(0, -5 * MIB), (2, -5 * MIB), (4, 10 * MIB)]
    assert replay_requests(requests).allocated == 20 * MIB
    assert not requests_fit(requests, 29 * MIB)
    assert requests_fit(requests, 30 * MIB)
    assert requests_fit(requests, 40 * MIB, AllocatorSettings(expandable_segments=True))


def test_a_key_may_be_born_again() -> None:
    assert replay_requests([(7, 512), (7, -512), (7, 512)]).allocated == 512


def test_emptying_the_cache_gives_back_whole_segments_only() -> None:
    kept_in_part = [(0, 12 * MIB), (1, 2 * MIB), (2, 2 * MIB), (0, -12 * MIB), (1, -2 * MIB), (-1, 0)]
    assert replay_requests([*kept_in_part, (3, 40 * MIB)]).reserved == 60 * MIB
    assert replay_requests([(0, 12 * MIB), (0, -12 * MIB), (-1, 0), (1, 14 * MIB)]).reserved == 14 * MIB
