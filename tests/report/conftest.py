from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from autobalance.devices.device import Device
from autobalance.partitioning.plan import Plan
from autobalance.partitioning.stage import Stage
from autobalance.profiling.profile import BlockCost, Profile

GIB = 2**30


class Elements(HTMLParser):
    """The elements of a page, in order, with the texts directly inside them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(page)
        self.close()
        assert not self._open, "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))
        if tag != "meta":
            self._open.append(self.found[-1])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[-1][2].append(data)

    def texts(self, tag: str, class_: str = "") -> list[str]:
        """Texts of the elements of a kind, and class where one is given."""
        return ["".join(words) for name, has, words in self.found if name == tag and class_ in (has.get("class") or "")]

    def bars(self, class_: str) -> list[tuple[str | None, str | None]]:
        """Start and length of the bars of a class."""
        return [(has["x"], has["width"]) for name, has, _ in self.found if name == "rect" and has["class"] == class_]


@pytest.fixture
def elements() -> Callable[[str], Elements]:
    return Elements


@pytest.fixture
def pipelined() -> Plan:
    """Four blocks in two stages, a batch of 4 in two micro-batches; a step takes 0.3 + 0.35 + 1 x 0.35 = 1.0 s."""
    names = ("embed", "layers[0]", "layers<1>", "head")
    blocks = tuple(
        BlockCost(name, "Layer", weights=GIB, gradients=GIB, optimizer=2 * GIB, inputs=GIB // 4, saved=GIB)
        for name in names
    )
    profile = Profile.from_costs(
        [4 * GIB] * 4, [2 * GIB] * 4, [GIB] * 4, [0.1] * 4, [0.2] * 4, names=names, batch_size=4
    )
    return Plan(
        assignment=(0, 0, 1, 1),
        blocks=blocks,
        devices=(Device("A100", 17 * GIB), Device("A100", 17 * GIB)),
        budgets=(16 * GIB, 16 * GIB),
        peaks=(12 * GIB + GIB // 2, 10 * GIB + GIB // 2),
        root=1,
        policy="auto",
        step_time=1.0,
        stages=(Stage(0, 2, 0, 2, 0.1, 0.2), Stage(2, 4, 1, 1, 0.1, 0.2, 0.05, GIB)),
        objective="step time",
        value=1.0,
        bounds={"area": 0.9, "indivisible block": 0.9, "transfers": 0.95, "memory": 1.0},
        optimal=True,
        advice=("head alone takes 30% of the step: splitting it in two would gain up to 10%",),
        micro_batches=2,
        schedule="1f1b",
        batch="training batch of 4",
        notes=("loss.item() was replaced",),
        profile=profile,
    )
