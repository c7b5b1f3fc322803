from __future__ import annotations

from autobalance.report.markup import element, percent


def test_texts_and_attributes_are_escaped_and_elements_are_not() -> None:
    inner = element("b", 'a < "b" & c')
    assert element("p", inner, class_='x"y', data_name="<z>", id=None) == (
        '<p class="x&quot;y" data-name="&lt;z&gt;"><b>a &lt; &quot;b&quot; &amp; c</b></p>'
    )


def test_lengths_are_percents() -> None:
    assert [percent(share) for share in (0, 0.125, 1 / 3, 1)] == ["0%", "12.5%", "33.333%", "100%"]
