from __future__ import annotations

from dataclasses import replace

from autobalance.partitioning.plan import Plan
from autobalance.report.shares import shares_of

GIB = 2**30


def test_what_is_saved_counts_once_for_each_micro_batch_in_flight(pipelined: Plan) -> None:
    first, second = shares_of(pipelined)
    # Two blocks of 1 GiB each; the first stage holds two micro-batches.
    assert (first.saved, second.saved) == (4 * GIB, 2 * GIB)
    assert (first.weights, first.gradients, first.optimizer) == (2 * GIB, 2 * GIB, 4 * GIB)


def test_a_stack_adds_up_to_the_peak(pipelined: Plan) -> None:
    assert shares_of(pipelined)[0].stack == (2 * GIB, 2 * GIB, 4 * GIB, 4 * GIB, GIB // 2)
    low = replace(pipelined, peaks=(9 * GIB, 3 * GIB))
    assert [share.stack for share in shares_of(low)] == [
        (2 * GIB, 2 * GIB, 4 * GIB, GIB, 0),
        (2 * GIB, GIB, 0, 0, 0),
    ]


def test_what_is_on_the_host_or_made_again_is_not_on_the_device(pipelined: Plan) -> None:
    saving = replace(pipelined, saving=("recompute", "offload", "keep", "keep"), host_optimizer=(1,), streamed=(3,))
    first, second = shares_of(saving)
    # A recomputed block keeps its input: a quarter of a GiB for each of two micro-batches.
    assert first.saved == GIB // 2
    assert (second.weights, second.optimizer) == (GIB, 0)
