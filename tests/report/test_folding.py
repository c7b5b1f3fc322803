from __future__ import annotations

from autobalance.report.folding import fold, fold_names


def test_a_figure_stays_with_its_unit() -> None:
    assert fold("memory 226 ms = optimal", 10) == ["memory", "  226 ms =", "  optimal"]
    assert fold("largest use 48.6% of 80.00 GiB", 24) == ["largest use 48.6% of", "  80.00 GiB"]


def test_a_long_name_breaks_after_a_dot_and_a_range_before_its_end() -> None:
    assert fold_names("model.decoder.embed_tokens, head", 16) == ["model.decoder.", "embed_tokens,", "head"]
    assert fold_names("model.layers.8 … 16", 15) == ["model.layers.8", "… 16"]
