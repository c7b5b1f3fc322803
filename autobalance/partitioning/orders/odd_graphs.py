"""Placement of parts that no chain describes, by mixed-integer programming: several groups, pins, graphs of any shape.

Memory enters as a linear lower bound: what each part holds by itself at a few instants of the step. So does time, with
the fastest link into each device. A plan that is found has to be replayed; the bound holds for every plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.transfers import Crossing

MOST_BINARIES = 2000
"""Parts x devices above which nothing is tried: HiGHS then finds no plan in minutes."""
SECONDS = 5.0
"""How long HiGHS may search."""
_BETTER = 1e-5
"""Share by which a plan has to beat the cut-off: HiGHS takes rows as met within 1e-6."""

Bytes = NDArray[np.int64]
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class OddGraph:
    """Parts that lie on one device each.

    Example:
        >>> OddGraph(held=np.array([[4, 2, 3]]), budgets=(8, 8), chain=(0, 1))

    Attributes:
        held: `[instant, part]`: bytes that a part holds by itself at some instants, (instants, parts).
        budgets: bytes per device.
        chain: parts in call order; a device holds consecutive ones of them. All others may lie anywhere.
        pins: part -> device.
        seconds: `[part, device]`: seconds of a micro-batch, there and back, (parts, devices); needed for step times.
        crossings: tensors that go from part to part; owners are indices of parts.
        links: `[from, to]`: bytes per second between devices, (devices, devices); needed for step times.
        micro_batches: parts of the batch.
        root: the part that is nothing but the root; None: the root is with blocks.
    """

    held: Bytes
    budgets: tuple[int, ...]
    chain: tuple[int, ...] = ()
    pins: Mapping[int, int] = field(default_factory=dict)
    seconds: Numbers | None = None
    crossings: tuple[Crossing, ...] = ()
    links: Numbers | None = None
    micro_batches: int = 1
    root: int | None = None


@dataclass(frozen=True)
class Placement:
    """What was found.

    Attributes:
        devices: device of every part; None where nothing was found in time, or nothing below the cut-off exists.
        value: of the objective, as the linear model has it; infinite without devices.
        bound: no plan is below that: a relative use, or seconds.
    """

    devices: tuple[int, ...] | None
    value: float
    bound: float


def place_parts(
    graph: OddGraph,
    objective: Literal["largest use", "step time"],
    *,
    cut_off: float = np.inf,
    seconds: float = SECONDS,
) -> Placement | None:
    """The best placement by mixed-integer programming (HiGHS), with a bound on all others.

    Example:
        >>> place_parts(graph, "largest use", cut_off=0.93).bound

    Args:
        graph: what is placed.
        objective: `"largest use"`: bytes held / budget; `"step time"`: seconds of all parts and transfers, and of the
            busiest device once more for each further micro-batch, within the budgets.
        cut_off: value of a plan that is known; only those that are better by a hundred-thousandth are of interest.
        seconds: how long to search.

    Returns:
        None where parts x devices are more than `MOST_BINARIES`: nothing was tried.

    Raises:
        ImportError: SciPy is not installed.
    """
    if graph.held.shape[1] * len(graph.budgets) > MOST_BINARIES:
        return None
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise ImportError(
            "groups that must share a device are placed with SciPy, which is not installed: "
            "pip install 'autobalance[solver]'"
        ) from error
    model = _Model(graph, objective)
    if np.isfinite(cut_off):
        model.row(model.objective, most=cut_off / model.unit * (1 - _BETTER))
    rows, columns, entries = (np.array(column) for column in zip(*model.entries, strict=True))
    found = milp(
        c=model.costs,
        integrality=model.integrality,
        bounds=Bounds(model.low, model.high),
        constraints=LinearConstraint(
            csr_array((entries, (rows, columns)), shape=(model.rows, len(model.costs))), model.least, model.most
        ),
        options={"time_limit": seconds, "mip_rel_gap": 1e-9},
    )
    return _placement(found, model, cut_off)


def _placement(found: Any, model: _Model, cut_off: float) -> Placement:
    if found.status == 2:  # nothing meets all rows, the one of the cut-off among them
        return Placement(None, np.inf, cut_off * (1 - _BETTER))
    bound = found.mip_dual_bound
    bound = -np.inf if bound is None or not np.isfinite(bound) else bound * model.unit
    if found.x is None:
        return Placement(None, np.inf, max(0.0, bound))
    chosen = np.asarray(found.x)[: model.binaries].reshape(model.parts, model.devices)
    return Placement(tuple(chosen.argmax(axis=1).tolist()), found.fun * model.unit, max(0.0, bound))


def _between(links: Numbers) -> Numbers:
    """Links between different devices."""
    apart: Numbers = links[~np.eye(len(links), dtype=bool)]
    return apart


class _Model:
    """Rows and columns of the programme. The first columns say, part by part, whether it is on each device."""

    def __init__(self, graph: OddGraph, objective: Literal["largest use", "step time"]) -> None:
        self.parts, self.devices = graph.held.shape[1], len(graph.budgets)
        self.binaries = self.parts * self.devices
        self.entries: list[tuple[int, int, float]] = []
        self.rows = 0
        self.least: list[float] = []
        self.most: list[float] = []
        self._high: list[float] = [1.0] * self.binaries
        self._graph = graph
        self.unit = 1.0
        """What the objective's values are multiples of: the solver's tolerances are for numbers around 1."""
        for part in range(self.parts):
            self.row({self.on(part, device): 1.0 for device in range(self.devices)}, least=1.0, most=1.0)
        if graph.chain:
            self._keep_consecutive(graph.chain)
        self.objective = self._largest_use() if objective == "largest use" else self._step_time()
        self.costs = np.zeros(len(self._high))
        self.costs[list(self.objective)] = list(self.objective.values())
        self.integrality = np.arange(len(self._high)) < self.binaries
        self.low, self.high = np.zeros(len(self._high)), np.array(self._high)
        for part, device in graph.pins.items():
            self.low[self.on(part, device)] = 1.0

    def on(self, part: int, device: int) -> int:
        return part * self.devices + device

    def column(self, high: float = np.inf) -> int:
        self._high.append(high)
        return len(self._high) - 1

    def row(self, weights: Mapping[int, float], *, least: float = -np.inf, most: float = np.inf) -> None:
        self.entries += [(self.rows, column, weight) for column, weight in weights.items()]
        self.least.append(least)
        self.most.append(most)
        self.rows += 1

    def _keep_consecutive(self, chain: Sequence[int]) -> None:
        begins: list[list[int]] = []
        for device in range(self.devices):
            begins.append([self.column(1.0) for _ in chain])
            for at, (begin, part) in enumerate(zip(begins[-1], chain, strict=True)):
                came_from = {self.on(chain[at - 1], device): 1.0} if at else {}
                self.row({begin: 1.0, self.on(part, device): -1.0, **came_from}, least=0.0)
            self.row(dict.fromkeys(begins[-1], 1.0), most=1.0)
        # Of devices that are alike, the earlier one begins first: all other orders are the same plans once more.
        for one, other in self._alike():
            for at, begin in enumerate(begins[other]):
                self.row({begin: 1.0, **dict.fromkeys(begins[one][:at], -1.0)}, most=0.0)

    def _alike(self) -> Iterator[tuple[int, int]]:
        """Pairs of devices that may change places, each with the next one of its kind."""
        graph, last = self._graph, dict[object, int]()
        for device in range(self.devices):
            seconds = () if graph.seconds is None else tuple(graph.seconds[:, device].tolist())
            # With links that differ, a device is known by its place among them.
            links = () if graph.links is None else tuple(np.unique(_between(graph.links)).tolist())
            own = device if len(links) > 1 or device in graph.pins.values() else None
            kind = graph.budgets[device], seconds, own
            if kind in last:
                yield last[kind], device
            last[kind] = device

    def _largest_use(self) -> dict[int, float]:
        largest = self.column()
        self._limit_memory({largest: -1.0}, most=0.0)
        return {largest: 1.0}

    def _limit_memory(self, beside: Mapping[int, float], most: float) -> None:
        for held in self._graph.held:
            heavy = np.flatnonzero(held).tolist()
            for device, budget in enumerate(self._graph.budgets):
                weights = {self.on(part, device): float(held[part]) / max(1, budget) for part in heavy}
                self.row({**weights, **beside}, most=most)

    def _step_time(self) -> dict[int, float]:
        graph = self._graph
        if graph.seconds is None or graph.links is None:
            raise ValueError("a step time needs the seconds of the parts and the links between devices")
        self._limit_memory({}, most=1.0)
        self.unit = float(graph.seconds.min(axis=1).sum()) or 1.0
        total: dict[int, float] = {}
        busy: list[dict[int, float]] = [{} for _ in range(self.devices)]
        for part, device in product(range(self.parts), range(self.devices)):
            busy[device][self.on(part, device)] = float(graph.seconds[part, device]) / self.unit
        fastest = [float(np.delete(graph.links[:, here], here).max(initial=0.0)) for here in range(self.devices)]
        for crossing, device in product(graph.crossings, range(self.devices)):
            if not fastest[device]:
                continue
            nbytes = crossing.nbytes * (1 + crossing.has_gradient)
            arrives = self.column(1.0)
            # What goes to the root counts with its sender, which the busiest device need not be.
            weights = total if graph.root in crossing.targets else busy[device]
            weights[arrives] = nbytes / fastest[device] / self.unit
            for target in crossing.targets:
                here = {self.on(target, device): -1.0, self.on(crossing.source, device): 1.0}
                self.row({arrives: 1.0, **here}, least=0.0)
        for weights in busy:
            total.update(weights)
        if graph.micro_batches > 1:
            busiest = self.column()
            for weights in busy:
                self.row({busiest: 1.0, **{column: -weight for column, weight in weights.items()}}, least=0.0)
            total[busiest] = graph.micro_batches - 1.0
        return total


def crossings_between(crossings: Sequence[Crossing], parts: Sequence[Sequence[int]]) -> tuple[Crossing, ...]:
    """Crossings with parts in place of owners; those inside a part are left out, and equal ones become one.

    Example:
        >>> crossings_between([Crossing(0, (1, 2), 8, True)], parts=[(0, 1), (2,)])
        (Crossing(source=0, targets=(1,), nbytes=8, has_gradient=True),)

    Args:
        crossings: between blocks and the root.
        parts: owners of each part.
    """
    return tuple(_joined(crossings, {owner: part for part, owners in enumerate(parts) for owner in owners}))


def _joined(crossings: Sequence[Crossing], place: Mapping[int, int]) -> Iterator[Crossing]:
    nbytes_of: dict[tuple[int, tuple[int, ...], bool], int] = {}
    for crossing in crossings:
        source = place[crossing.source]
        targets = tuple(sorted({place[target] for target in crossing.targets} - {source}))
        if targets:
            key = source, targets, crossing.has_gradient
            nbytes_of[key] = nbytes_of.get(key, 0) + crossing.nbytes
    for (source, targets, has_gradient), nbytes in nbytes_of.items():
        yield Crossing(source, targets, nbytes, has_gradient)
