from __future__ import annotations

import numpy as np

from autobalance.partitioning.savings.saving_options import Option, options_of
from autobalance.partitioning.savings.savings import SavingCosts


def _costs(*, may_recompute: bool = True, may_offload: bool = True, streams: bool = False) -> SavingCosts:
    """A block of 100 bytes that stay, 30 of which may stream, and 40 that it saves."""

    def column(value: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([value], dtype=np.int64)

    return SavingCosts(
        static=column(100),
        saved=column(40),
        kept=column(10),
        left=column(4),
        forward_transient=column(35),
        backward_transient=column(7),
        forward_time=np.array([2.0]),
        recomputable=np.array([may_recompute]),
        offloadable=np.array([may_offload]),
        streamable=column(30 * streams),
        carried=column(60 * streams),
        staged=column(31 * streams),
        pinned_saved=column(64),
        pinned_weights=column(32 * streams),
    )


def test_a_block_keeps_runs_again_or_copies() -> None:
    assert options_of(_costs(), 0, in_flight=3, host_link=9.0) == [
        Option("keep", False, 40, 47, 0, 0, 0, 0, 0),
        # While it runs again its inputs rest beside 35 transient bytes: less than what it saves and the backward takes.
        Option("recompute", False, 10, 47, 0, 0, 2.0, 0, 0),
        Option("offload", False, 4, 47, 0, 0, 0, 2 * 36 / 9.0, 3 * 64),
    ]


def test_only_what_is_allowed_is_an_option() -> None:
    words = [option.saving for option in options_of(_costs(may_recompute=False), 0, 1, 9.0)]
    assert words == ["keep", "offload"]
    assert len(options_of(_costs(may_recompute=False, may_offload=False), 0, 1, 9.0)) == 1


def test_weights_stream_beside_whatever_becomes_of_saved_bytes() -> None:
    plain, streaming = np.split(np.array(options_of(_costs(streams=True), 0, 3, 9.0), dtype=object), 2)
    for there, away in zip(plain, streaming, strict=True):
        assert (away.saving, away.streams) == (there.saving, True)
        assert (away.leaves, away.staged) == (30, 31)
        assert away.copying == there.copying + 60 / 9.0
        assert away.pinned == there.pinned + 32
