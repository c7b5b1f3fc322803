"""Batches that have no number of samples a planner could scale, graphs and packed sequences, run in micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader

from autobalance import simulate
from autobalance.devices.device import Device
from autobalance.strategy.registration import strategy_class
from tests.strategy.split_runs import CLASSES, DEVICES, WIDTH, compare, fit_alone, fit_split, make, strategy_of

pytestmark = pytest.mark.usefixtures("simulated")


class Graphs:
    """Graphs as one, as graph libraries collate them: nodes one after the other, edges between them, whose each is."""

    def __init__(self, nodes: Tensor, edges: Tensor, graph_of: Tensor, labels: Tensor) -> None:
        self.nodes, self.edges, self.graph_of, self.labels = nodes, edges, graph_of, labels

    @classmethod
    def of(cls, graphs: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Graphs:
        starts = torch.tensor([0, *(len(nodes) for nodes, _, _ in graphs)]).cumsum(0)
        return cls(
            torch.cat([nodes for nodes, _, _ in graphs]),
            torch.cat([edges + start for (_, edges, _), start in zip(graphs, starts, strict=False)], dim=1),
            torch.cat([torch.full((len(nodes),), index) for index, (nodes, _, _) in enumerate(graphs)]),
            torch.stack([label for _, _, label in graphs]),
        )

    @property
    def num_graphs(self) -> int:
        return len(self.labels)

    def chosen(self, which: Sequence[int]) -> Graphs:
        """Some of the graphs, numbered anew; which nodes are theirs only numbers tell."""
        kept = torch.isin(self.graph_of, torch.tensor(which, device=self.graph_of.device))
        number = kept.cumsum(0) - 1
        edges = self.edges[:, kept[self.edges[0]]]
        _, graph_of = torch.unique(self.graph_of[kept], return_inverse=True)
        return type(self)(self.nodes[kept], number[edges], graph_of, self.labels[list(which)])

    def to(self, device: Any, **options: Any) -> Graphs:
        """Changes itself, as graph libraries have it."""
        vars(self).update({name: each.to(device) for name, each in vars(self).items()})
        return self


def graph(nodes: int, label: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    edges = torch.randint(nodes, (2, 2 * nodes), generator=generator)
    return torch.randn(nodes, WIDTH, generator=generator), edges, torch.tensor(label % CLASSES)


def graphs(*sizes: Sequence[int]) -> DataLoader[Any]:
    """Batches of graphs with so many nodes each."""
    generator = torch.Generator().manual_seed(5)
    batches = [
        Graphs.of([graph(nodes, label, generator) for label, nodes in enumerate(each, index)])
        for index, each in enumerate(sizes)
    ]
    return DataLoader(batches, batch_size=None, collate_fn=copy.copy)  # type: ignore[arg-type]


def only_trains(lightning: ModuleType, **attributes: Any) -> dict[str, Any]:
    """Attributes of a module that has no validation step."""
    return {"validation_step": lightning.LightningModule.validation_step, **attributes}


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        return torch.tanh(self.own(nodes).index_add(0, target, self.others(nodes)[source]))


def make_graph_net(lightning: ModuleType, **attributes: Any) -> Any:
    """Three convolutions and a head, a block each."""

    class GraphNet(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            convolutions = [Convolution() for _ in range(DEVICES - 1)]
            self.layers = nn.ModuleList([*convolutions, nn.Linear(WIDTH, CLASSES)])

        def self_balance(self) -> list[nn.Module]:
            return list(self.layers)

        def forward(self, batch: Graphs) -> Tensor:
            *convolutions, head = self.layers
            nodes = batch.nodes
            for convolution in convolutions:
                nodes = convolution(nodes, batch.edges)
            pooled = nodes.new_zeros(len(batch.labels), WIDTH).index_add(0, batch.graph_of, nodes)
            made: Tensor = head(pooled)
            return made

        def split_batch(self, batch: Graphs, n: int) -> list[Graphs]:
            each = [list(range(len(batch.labels)))[part::n] for part in range(n)]
            return [batch.chosen(which) for which in each if which]

        def training_step(self, batch: Graphs, batch_idx: int) -> Tensor:
            loss = functional.cross_entropy(self(batch), batch.labels)
            self.log("train", loss, on_step=True, on_epoch=True, batch_size=batch.num_graphs)
            return loss

        def validation_step(self, batch: Graphs, batch_idx: int) -> None:
            self.log("val", functional.cross_entropy(self(batch), batch.labels), batch_size=batch.num_graphs)

        def test_step(self, batch: Graphs, batch_idx: int) -> None:
            self.log("test", functional.cross_entropy(self(batch), batch.labels), batch_size=batch.num_graphs)

        def predict_step(self, batch: Graphs, batch_idx: int) -> Tensor:
            made: Tensor = self(batch)
            return made

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return type("GraphNet", (GraphNet,), attributes)()


LARGE, SMALL = [9, 4, 7, 5, 8, 6, 3], [3, 2, 4, 3, 2, 4]


@pytest.mark.both_packages
def test_graphs_train_in_micro_batches_as_in_one(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str]
) -> None:
    loaders = graphs(LARGE, SMALL, LARGE), graphs(SMALL, SMALL)
    split = fit_split(
        lightning,
        trainer,
        make_graph_net(lightning),
        loaders,
        strategy_of(lightning, "1f1b", 3),
        expected=3,
        max_epochs=2,
    )
    compare(split, fit_alone(lightning, trainer, make_graph_net(lightning), loaders, max_epochs=2))
    assert not [said for said in messages if "whole" in said or "not split" in said]


def test_parts_of_uneven_sizes_count_by_their_graphs(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    def split_batch(self: Any, batch: Graphs, n: int) -> list[Graphs]:
        first = list(range(batch.num_graphs))[: 1 - n or None]
        return [batch.chosen(which) for which in (first, *([index] for index in range(len(first), batch.num_graphs)))]

    models = [make_graph_net(lightning, split_batch=split_batch) for _ in range(2)]
    loaders = graphs(LARGE, LARGE), graphs(SMALL)
    split = fit_split(lightning, trainer, models[0], loaders, strategy_of(lightning, "gpipe", 3), expected=3)
    compare(split, fit_alone(lightning, trainer, models[1], loaders))


def test_graphs_are_evaluated_in_micro_batches(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    def split_batch(self: Any, batch: Graphs, n: int) -> list[Graphs]:  # in order, as predictions are
        which = torch.arange(batch.num_graphs).tensor_split(n)
        return [batch.chosen(each.tolist()) for each in which if len(each)]

    net, loader = make_graph_net(lightning, split_batch=split_batch), graphs(LARGE, SMALL)
    made = trainer(strategy=strategy_of(lightning, "1f1b", 3))
    plain = trainer(accelerator="cpu", devices=1, strategy="auto")
    for run in ("validate", "test"):
        (found,), (expected,) = (getattr(one, run)(net, loader, verbose=False) for one in (made, plain))
        assert found == pytest.approx(expected, rel=1e-5)
        assert made.strategy.plan.micro_batches == 3
    found, expected = made.predict(net, loader), plain.predict(net, loader)
    torch.testing.assert_close([each.cpu() for each in found], expected, rtol=1e-4, atol=1e-5)
    assert made.strategy.plan.micro_batches == 3


def sentences(packs: Callable[..., PackedSequence], *lengths: Sequence[int]) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    batches = [
        (packs([torch.randn(length, WIDTH, generator=generator) for length in each]), torch.arange(len(each)) % CLASSES)
        for each in lengths
    ]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        made: PackedSequence = self.layer(packed)[0]
        return made


class EachStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        return packed._replace(data=torch.tanh(self.layer(packed.data)))


class Last(nn.Module):
    """Classifies the mean over each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, packed: PackedSequence) -> Tensor:
        padded, lengths = nn.utils.rnn.pad_packed_sequence(packed)
        made: Tensor = self.layer(padded.sum(0) / lengths.to(padded.device)[:, None])
        return made


def make_recurrent(lightning: ModuleType) -> Any:
    """Layers over packed sequences, a block each."""

    class RecurrentNet(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.layers = nn.Sequential(EachStep(), Recurrent(), EachStep(), Last())

        def self_balance(self) -> list[nn.Module]:
            return list(self.layers)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            packed, labels = batch
            loss = functional.cross_entropy(self.layers(packed), labels)
            self.log("train", loss, on_step=True, on_epoch=True, batch_size=len(labels))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return RecurrentNet()


@pytest.mark.parametrize("is_sorted", [True, False], ids=["sorted", "in any order"])
def test_packed_sequences_train_in_micro_batches_as_in_one(
    lightning: ModuleType, trainer: Callable[..., Any], is_sorted: bool, messages: list[str]
) -> None:
    def packs(sequences: list[Tensor]) -> PackedSequence:
        by_length = sorted(sequences, key=len, reverse=True) if is_sorted else sequences
        return pack_sequence(by_length, enforce_sorted=is_sorted)

    loader = sentences(packs, [10, 18, 6, 14, 12, 4, 16], [8, 7, 5, 10], [10, 18, 6, 14, 12, 4, 16])
    split = fit_split(
        lightning, trainer, make_recurrent(lightning), [loader], strategy_of(lightning, "1f1b", 2), expected=2
    )
    compare(split, fit_alone(lightning, trainer, make_recurrent(lightning), [loader]))
    assert not [said for said in messages if "whole" in said or "not split" in said]


def test_fewer_parts_than_are_asked_for_are_told_of(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str]
) -> None:
    few = [5, 6, 4]
    split = fit_split(
        lightning,
        trainer,
        make_graph_net(lightning),
        [graphs(few, few), graphs(few)],
        strategy_of(lightning, "gpipe", 4),
        expected=3,
    )
    compare(split, fit_alone(lightning, trainer, make_graph_net(lightning), [graphs(few, few), graphs(few)]))
    (told,) = [said for said in messages if "split_batch" in said]
    assert told.startswith("`split_batch` makes 3 parts of the first training batch")
    assert told.endswith("not 4: this is how many micro-batches there are.")


@pytest.mark.parametrize(("asked", "number"), [("auto", 2), (4, 4)])
def test_sequences_too_few_for_batch_norms_in_parts_stay_whole(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str], asked: Any, number: int
) -> None:
    class Normalised(EachStep):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, packed: PackedSequence) -> PackedSequence:
            return packed._replace(data=self.norm(self.layer(packed.data)))

    net = make_recurrent(lightning)
    net.layers[0] = Normalised()
    made = trainer(strategy=strategy_of(lightning, "1f1b", asked, batch_norm="deferred"))
    made.fit(net, sentences(pack_sequence, [10, 8, 6]))
    assert made.strategy.plan.micro_batches == 1
    told = f"the first training batch (24x8, 3) has samples for 1 part, not {number}."
    assert sum(said.startswith("Batches are not split") and told in said for said in messages) == 1


def test_as_many_parts_as_make_a_step_short(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    slow = [Device(f"slow {index}", 2**30, flops=1e6, bandwidth=1e12) for index in range(DEVICES)]
    loaders = graphs(LARGE), graphs(SMALL)
    with simulate(slow):
        made, whole = (
            trainer(strategy=strategy_class((lightning.__name__,))(schedule=schedule)) for schedule in ("auto", "naive")
        )
        for each in (made, whole):
            each.fit(make_graph_net(lightning), *loaders)
        assert made.strategy.plan.micro_batches > 1
        assert whole.strategy.plan.micro_batches == 1
        assert made.strategy.plan.step_time < 0.8 * whole.strategy.plan.step_time


def test_parts_are_made_where_the_whole_does_not_fit(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    nodes = [14 * each for each in LARGE]
    loaders = graphs(nodes, nodes), graphs(SMALL)
    whole = trainer(strategy=strategy_class((lightning.__name__,))(schedule="naive"))
    whole.fit(make_graph_net(lightning), *loaders)
    budget = int(0.85 * max(whole.strategy.plan.peaks))
    with simulate([Device(f"small {index}", budget) for index in range(DEVICES)]):
        fitted = fit_split(
            lightning,
            trainer,
            make_graph_net(lightning),
            loaders,
            strategy_class((lightning.__name__,))(recompute=False),
            expected=7,
            reaches=0,
        )
    compare(fitted, fit_alone(lightning, trainer, make_graph_net(lightning), loaders))


def test_a_later_batch_with_a_larger_part_is_told_of(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    loaders = graphs([4] * 6, [9, 2, 2, 2, 2, 2], [4] * 6), graphs(SMALL)
    made = trainer(strategy=strategy_of(lightning, "1f1b", 2))
    with pytest.warns(UserWarning, match="A part of this batch has 172 elements, .* parts of up to 159: ") as said:
        made.fit(make_graph_net(lightning), *loaders)
    assert sum("A part of this batch" in str(warning.message) for warning in said) == 1


def broken(batch: Graphs, n: int) -> Any:
    raise KeyError("graphs")


@pytest.mark.parametrize(
    ("split_batch", "reason"),
    [
        (lambda batch, n: [], "`split_batch` of GraphNet gives list without parts: it is asked for up to 2, each like"),
        (lambda batch, n: batch, "`split_batch` of GraphNet gives Graphs instead of a list of parts"),
        (lambda batch, n: [batch.chosen([0])] * 3, "`split_batch` of GraphNet gives 3 parts, but is asked for up to 2"),
        (lambda batch, n: [batch.chosen([0]), batch.chosen([1, 2])], "its parts have 1 + 2 = 3 of the 7 of a batch"),
        (lambda batch, n: [batch], "`split_batch` makes one part of a batch"),
        (broken, "splitting a batch, as `split_batch` and `loss_weight` say, raised KeyError: 'graphs'"),
    ],
    ids=["nothing", "no list", "too many", "loses samples", "one part", "raises"],
)
def test_a_hook_that_does_not_split_batches_leaves_them_whole_and_is_named(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str], split_batch: Any, reason: str
) -> None:
    net = make_graph_net(lightning, split_batch=lambda self, batch, n: split_batch(batch, n))
    made = trainer(strategy=strategy_of(lightning, "1f1b", 2))
    made.fit(net, graphs(LARGE), graphs(SMALL))
    assert made.strategy.plan.micro_batches == 1
    assert len([said for said in messages if reason in said and said.startswith("Batches are not split")]) == 1


class Unnumbered(Graphs):
    """Graphs that do not say how many there are."""

    num_graphs = None  # type: ignore[assignment]


def unnumbered(*sizes: Sequence[int]) -> DataLoader[Any]:
    batches = [Unnumbered(*vars(each).values()) for each in graphs(*sizes)]
    return DataLoader(batches, batch_size=None, collate_fn=copy.copy)  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [3, len(LARGE)], ids=["several in each", "one in each"])
def test_graphs_that_nobody_counts_are_weighed_by_the_hook(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str], parts: int
) -> None:
    own = only_trains(
        lightning,
        loss_weight=lambda self, batch: len(batch.labels),
        training_step=lambda self, batch, batch_idx: functional.cross_entropy(self(batch), batch.labels),
    )
    loaders = [unnumbered(LARGE, SMALL, LARGE)]
    split = fit_split(
        lightning,
        trainer,
        make_graph_net(lightning, **own),
        loaders,
        strategy_of(lightning, "1f1b", parts),
        expected=parts,
    )
    compare(split, fit_alone(lightning, trainer, make_graph_net(lightning, **own), loaders))
    assert not [said for said in messages if "not split" in said]
    if parts == 3:
        unweighed = make_graph_net(lightning, **{name: each for name, each in own.items() if name != "loss_weight"})
        trainer(strategy=strategy_of(lightning, "1f1b", parts)).fit(unweighed, *loaders)
        (reason,) = [said for said in messages if "not split" in said]
        assert "give parts `num_graphs`, or define `loss_weight(self, batch)`" in reason


def test_parts_that_are_views_share_the_memory_of_their_batch(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    def split_batch(self: Any, batch: Any, n: int) -> list[Any]:
        return list(zip(batch[0].tensor_split(n, dim=1), batch[1].tensor_split(n), strict=True))

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self.layers(batch[0]).mean(0), batch[1])

    own = only_trains(
        lightning,
        split_batch=split_batch,
        training_step=training_step,
        loss_weight=lambda self, batch: len(batch[1]),
    )
    generator = torch.Generator().manual_seed(9)
    # Sequences beside each other: the first dimension is that of time.
    batches = [(torch.randn(200, 7, WIDTH, generator=generator), torch.arange(7) % CLASSES) for _ in range(2)]
    loaders: list[Any] = [DataLoader(batches, batch_size=None)]  # type: ignore[arg-type]
    split = fit_split(
        lightning,
        trainer,
        make(lightning, **own),
        loaders,
        strategy_of(lightning, "1f1b", 3),
        expected=3,
    )
    compare(split, fit_alone(lightning, trainer, make(lightning, **own), loaders))


def test_lists_of_tensors_of_different_sizes_train_in_micro_batches(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        outputs = self.layers(torch.cat(images)).split([len(image) for image in images])
        return functional.cross_entropy(torch.stack([output.mean(0) for output in outputs]), labels)

    generator = torch.Generator().manual_seed(9)
    batches = [
        ([torch.randn(rows, WIDTH, generator=generator) for rows in (30, 50, 20, 40, 10, 60, 44)], torch.arange(7) % 3)
        for _ in range(2)
    ]
    loaders: list[Any] = [DataLoader(batches, batch_size=None)]  # type: ignore[arg-type]
    models = [make(lightning, **only_trains(lightning, training_step=training_step)) for _ in range(2)]
    split = fit_split(lightning, trainer, models[0], loaders, strategy_of(lightning, "1f1b", 3), expected=3)
    compare(split, fit_alone(lightning, trainer, models[1], loaders))


def test_a_longer_batch_is_planned_for_anew(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str]
) -> None:
    loaders = graphs(SMALL, LARGE, LARGE), graphs(SMALL)
    split = fit_split(
        lightning,
        trainer,
        make_graph_net(lightning),
        loaders,
        strategy_of(lightning, "1f1b", 3, rebalance=True),
        expected=3,
    )
    compare(split, fit_alone(lightning, trainer, make_graph_net(lightning), loaders))
    assert sum("the plan was made again" in said for said in messages) == 1
