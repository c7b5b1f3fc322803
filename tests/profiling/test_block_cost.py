from __future__ import annotations

from autobalance.devices.roofline import Work
from autobalance.profiling.block_cost import BlockCost, between


def test_work_of_another_batch_lies_on_the_line_through_two() -> None:
    # Weights of 40 bytes and 10 for each sample; 3 kernels at any batch.
    one = BlockCost("a", forward_work=(Work("float32", 7, 50, 3),))
    two = BlockCost("a", forward_work=(Work("float32", 14, 60, 3),))
    assert between(one, two, 7.0).forward_work == (Work("float32", 7 * 8, 40 + 80, 3),)


def test_where_intensities_fall_into_other_classes_each_arithmetic_grows_as_its_own_sum() -> None:
    one = BlockCost("a", forward_work=(Work("", 0, 10, 4), Work("float32", 30, 50, 3)))
    two = BlockCost("a", forward_work=(Work("", 0, 20, 4), Work("float32", 40, 30, 2), Work("float32", 20, 25, 1)))
    # Of 8 samples: 8 * 10 elementwise; 30 operations each; 45 bytes and 5 each; as many kernels as of one.
    assert between(one, two, 7.0).forward_work == (Work("", 0, 80, 4), Work("float32", 240, 85, 3))
