from __future__ import annotations

import pickle

from autobalance.errors import InfeasiblePlanError


def test_shortfall_is_what_each_device_lacks() -> None:
    error = InfeasiblePlanError("too big", need=(13, 5), budget=(10, 8), largest_block="head")
    assert isinstance(error, ValueError)
    assert error.shortfall == (3, 0)


def test_the_figures_survive_a_process_boundary() -> None:
    error = InfeasiblePlanError("too big", need=(13, 5), budget=(10, 8), largest_block="head")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.need, copy.budget, copy.shortfall, copy.largest_block) == (
        "too big",
        (13, 5),
        (10, 8),
        (3, 0),
        "head",
    )
