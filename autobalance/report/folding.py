"""Sentences below a table, which fold between words and never inside a figure."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_GLUE = "\N{NO-BREAK SPACE}"  # textwrap, unlike rich, does not break a line there
_FIGURE = re.compile(r"(?<=\d) (?=(?:s|ms|µs|B|[KMGT]iB|%)(?!\w))")


@dataclass(frozen=True)
class Sentences:
    """Lines of words as wide as the terminal; what does not fit goes on indented, figures with their units.

    Example:
        >>> rich.print(Sentences(("predicted step 1.40 s: 1f1b",)))

    Attributes:
        lines: what to say; brackets show as they are.
    """

    lines: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            for part in fold(line, options.max_width):
                yield Text(part, overflow="fold")


def fold(line: str, width: int) -> list[str]:
    """A sentence in lines of at most `width` characters.

    Example:
        >>> fold("largest use 90.4 % of 80.00 GiB", 24)
        ['largest use 90.4 % of', '  80.00 GiB']

    Args:
        line: the sentence.
        width: characters.
    """
    glued = _FIGURE.sub(_GLUE, line)
    folded = textwrap.wrap(glued, width, subsequent_indent="  ", break_on_hyphens=False)
    return [part.replace(_GLUE, " ") for part in folded]


def fold_names(words: str, width: int) -> list[str]:
    """Names in lines of at most `width` characters; the end of a range stays whole, a longer name breaks after a dot.

    Example:
        >>> fold_names("model.decoder.embed_tokens, head", 16)
        ['model.decoder.', 'embed_tokens,', 'head']

    Args:
        words: names and what stands between them.
        width: characters.
    """
    lines = [""]
    for word in re.findall(r"… \S+|\S+", words):
        if len(lines[-1]) + 1 + len(word) <= width and lines[-1]:
            lines[-1] += f" {word}"
            continue
        lines.append("")
        for part in re.findall(r"[^.]*\.|[^.]+", word):
            if len(lines[-1]) + len(part) > width and lines[-1]:
                lines.append("")
            lines[-1] += part
    return [line for line in lines if line]
