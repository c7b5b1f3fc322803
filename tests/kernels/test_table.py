"""Rows that hold from a release of torch or a compute capability on."""

from __future__ import annotations

from autobalance.kernels.table import EFFICIENT_GROUPED, TABLES, Row, Table, versioned
from autobalance.kernels.target import Target, find_target

GPU = Target("cuda", "some GPU", (8, 0))


def test_last_row_that_holds_counts() -> None:
    table = Table("fact", "file", (Row("old"), Row("new", torch=(2, 12)), Row("other", capability=(9, 0))))
    assert table.value(GPU, (2, 11)) == "old"
    assert table.value(GPU, (2, 12)) == "new"
    assert table.value(Target("cuda", "other GPU", (9, 0)), (2, 12)) == "other"


def test_row_ends_below_a_capability() -> None:
    table = Table("fact", "file", (Row(1), Row(2, capability=(8, 0), below=(9, 0))))
    assert [table.value(Target("cuda", "", (major, 0)), (2, 13)) for major in (7, 8, 9)] == [1, 2, 1]


def test_every_table_has_a_source_and_speaks_of_every_gpu() -> None:
    for name in ("V100-16GB", "T4", "A100-80GB", "RTX4090", "H100-80GB"):
        assert all(table.value(find_target(name), (2, 10)) is not None for table in TABLES)
    assert all(table.source for table in TABLES)


def test_differences_between_releases_are_named() -> None:
    assert EFFICIENT_GROUPED in versioned(GPU, (2, 13), (2, 14))
    assert versioned(GPU, (2, 13), (2, 13)) == []
