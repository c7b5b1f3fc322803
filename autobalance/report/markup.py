"""HTML and SVG elements, in which every text is escaped unless it is an element itself."""

from __future__ import annotations

import html


class Markup(str):
    """Text that is HTML already.

    Example:
        >>> Markup("<br>")
        '<br>'
    """

    __slots__ = ()


def element(name: str, *children: str, **attributes: object) -> Markup:
    """An element with its attributes and children.

    Example:
        >>> element("p", "a < b", class_="note")
        '<p class="note">a &lt; b</p>'

    Args:
        name: of the element.
        children: elements, and texts that are escaped.
        attributes: by name, where `_` stands for `-` and one at the end is dropped; None: without that attribute.
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{told}>{joined(*children)}</{name}>")


def joined(*children: str) -> Markup:
    """Elements and texts one after another.

    Example:
        >>> joined("1 < 2", Markup("<br>"))
        '1 &lt; 2<br>'

    Args:
        children: texts are escaped, elements are not.
    """
    return Markup("".join(child if isinstance(child, Markup) else html.escape(child) for child in children))


def percent(share: float) -> str:
    """A share as a length of SVG and CSS.

    Example:
        >>> percent(0.125)
        '12.5%'

    Args:
        share: of 1.
    """
    return f"{share * 100:.3f}".rstrip("0").rstrip(".") + "%"
