"""Sample batches come from the user's own loaders, which never notice: training afterwards is the same to the bit."""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

import autobalance
from autobalance.placement.contents import elements_in
from autobalance.strategy.options import Options
from autobalance.strategy.planning.loaders import describe, sample_batches
from autobalance.strategy.planning.undisturbed import undisturbed

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")

WIDTH, SIZE = 4, 24


class Noisy(Dataset[Tensor]):
    """Draws from every kind of random generator for each item, two of them its own, and counts."""

    def __init__(self) -> None:
        self.numpy = np.random.default_rng(1)
        self.torch = torch.Generator().manual_seed(2)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        self.asked.append(index)
        own = self.numpy.random() + float(torch.rand((), generator=self.torch)) + len(self.asked)
        return torch.full((WIDTH,), own + random.random() + np.random.rand() + float(torch.rand(())))


class Turning(Sampler[int]):
    """Starts each epoch where the last one ended."""

    def __init__(self) -> None:
        super().__init__()
        self.position = 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            self.position = (self.position + 5) % SIZE
            yield self.position


class Net:
    """Dropout and batch norm, so that random numbers and statistics would show a trace."""

    def self_balance(self: Any) -> list[Any]:
        return list(self.layers)

    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.cpu().clone())
        return self.layers(batch).pow(2).mean()

    def configure_optimizers(self: Any) -> Any:
        assert self.trainer.estimated_stepping_batches > 0  # starts the loader of the first epoch
        return torch.optim.Adam(self.parameters(), lr=0.01)


def make(lightning: ModuleType) -> Any:
    torch.manual_seed(0)
    model = type("Model", (Net, lightning.LightningModule), {})()
    model.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
    model.seen = []
    return model


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "own generator": lambda: DataLoader(Noisy(), 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "stateful sampler": lambda: DataLoader(Noisy(), 4, sampler=Turning()),
    "2 workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2),
    "2 persistent workers": lambda: DataLoader(
        Noisy(), 4, shuffle=True, num_workers=2, persistent_workers=True, generator=torch.Generator().manual_seed(5)
    ),
    "two loaders": lambda: [DataLoader(Noisy(), 4, shuffle=True), DataLoader(Noisy(), 4, sampler=Turning())],
}


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("kind", LOADERS)
def test_training_after_sampling_and_trial_is_that_without(
    lightning: ModuleType, trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def run(plan: Any = None) -> tuple[list[Tensor], dict[str, Tensor], Any]:
        model = make(lightning)
        if kind == "two loaders":
            step = type(model).training_step
            type(model).training_step = lambda self, batch, batch_idx: step(self, torch.cat(batch), batch_idx)
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        made = trainer(max_epochs=2, strategy=autobalance.SelfBalanceStrategy(plan=plan))
        made.fit(model, LOADERS[kind]())
        return model.seen, model.state_dict(), made.strategy.plan

    seen, weights, plan = run()
    monkeypatch.setattr("autobalance.strategy.planning.planning.sample_batches", None)
    expected_seen, expected_weights, _ = run(replace(plan, fingerprint=""))  # not knowing its batch, it asks for none
    assert len(seen) == len(expected_seen) == 2 * SIZE // 4
    assert all(torch.equal(one, other) for one, other in zip(seen, expected_seen, strict=True))
    assert all(torch.equal(value, expected_weights[name]) for name, value in weights.items())


def test_one_batch_of_every_loader_of_the_run(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    found: dict[str, list[tuple[str, int, int]]] = {}

    def size(rows: int) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(8, WIDTH)), batch_size=rows)

    class Look(lightning.Callback):
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            batches = sample_batches(trainer, Options())
            found[stage] = [(batch.kind, batch.loader, len(batch.data[0])) for batch in batches]

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer(batch[0]).sum()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.layer(batch[0])

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.layer(batch[0])

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def test_dataloader(self) -> Any:
            return size(3)

    plain = {"accelerator": "cpu", "devices": 1, "strategy": "auto"}
    made = trainer(callbacks=[Look()], **plain)
    model = Model()
    made.fit(model, size(2), [size(4), size(8)])
    made.validate(model, size(5), verbose=False)
    made.test(model, verbose=False)
    made.predict(model, size(6))
    trainer(callbacks=[Look()], limit_val_batches=0, **plain).fit(model, size(7), size(1))
    assert found.pop("validate") == [("validate", 0, 5)]
    assert found.pop("test") == [("test", 0, 3)]
    assert found.pop("predict") == [("predict", 0, 6)]
    assert found == {"fit": [("train", 0, 7)]}

    made = trainer(callbacks=[Look()], **plain)
    made.fit(model, size(2), [size(4), size(8)])
    assert found["fit"] == [("train", 0, 2), ("validate", 0, 4), ("validate", 1, 8)]


@pytest.mark.both_packages
def test_loaders_that_go_together_give_one_batch(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    combined = importlib.import_module(f"{lightning.__name__}.utilities.combined_loader").CombinedLoader
    found: list[Any] = []

    class Look(lightning.Callback):
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            found.extend((batch.kind, batch.data) for batch in sample_batches(trainer, Options()))

    model = make(lightning)
    type(model).validation_step = lambda self, batch, batch_idx: None
    together = combined({"a": DataLoader(torch.zeros(4, WIDTH)), "b": [5, 6]}, "min_size")
    plain = {"accelerator": "cpu", "devices": 1, "strategy": "auto"}
    trainer(callbacks=[Look()], **plain).fit(model, DataLoader(torch.ones(4, WIDTH), batch_size=2), together)
    assert found[0][1].tolist() == [[1.0] * WIDTH] * 2
    assert (found[1][0], found[1][1]["b"]) == ("validate", 5)
    assert found[1][1]["a"].tolist() == [[0.0] * WIDTH]
    assert len(found) == 2


@pytest.mark.both_packages
@pytest.mark.usefixtures("simulated")
def test_a_data_module_never_notices(
    lightning: ModuleType, trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Data(lightning.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(1)
            self.calls: list[str] = []

        def train_dataloader(self) -> Any:
            part, _ = torch.utils.data.random_split(Noisy(), [16, SIZE - 16], generator=self.generator)
            return DataLoader(part, 4, shuffle=True, generator=self.generator)

        def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
            self.calls.append(str(batch.device))
            return batch + torch.randn((), generator=self.generator)

    def run(plan: Any = None) -> tuple[list[Tensor], Any]:
        model = make(lightning)
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        made = trainer(max_epochs=2, strategy=autobalance.SelfBalanceStrategy(plan=plan))
        made.fit(model, datamodule=Data())
        return model.seen, made.strategy.plan

    seen, plan = run()
    monkeypatch.setattr("autobalance.strategy.planning.planning.sample_batches", None)
    expected, _ = run(replace(plan, fingerprint=""))
    assert len(seen) == len(expected) == 8
    assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True))


@pytest.mark.usefixtures("simulated")
def test_the_largest_of_the_first_batches_is_found_by_its_shape(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    lengths = [2, 3, 9, 4, 50]
    batches: Any = [torch.zeros(length, WIDTH) for length in lengths]
    made = trainer(strategy=autobalance.SelfBalanceStrategy(worst_batch="scan:4"))
    with pytest.warns(UserWarning, match=r"This batch has 200 elements, but the plan was made for batches of up to 36"):
        made.fit(make(lightning), DataLoader(batches, batch_size=None))
    assert made.strategy.plan.batch == "largest of the first 4 (number 3) training batch (9x4)"


@pytest.mark.usefixtures("simulated")
def test_a_given_worst_batch_replaces_the_first(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    made = trainer(strategy=autobalance.SelfBalanceStrategy(worst_batch=torch.zeros(12, WIDTH)))
    made.fit(make(lightning), DataLoader(torch.zeros(8, WIDTH), batch_size=4))  # type: ignore[arg-type]
    assert made.strategy.plan.batch == "the given worst batch (12x4)"


@pytest.mark.usefixtures("simulated")
def test_a_loader_that_can_be_read_only_once_is_named(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    model = make(lightning)
    type(model).configure_optimizers = lambda self: torch.optim.SGD(self.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="The train loader is a generator that can be read only once"):
        trainer().fit(model, (torch.zeros(4, WIDTH) for _ in range(3)))
    assert len(model.seen) == 2


class Stream(IterableDataset[Tensor]):
    """Reads a file of numbers from where it stands."""

    def __init__(self, path: Any) -> None:
        self.file = open(path)  # noqa: SIM115  # stays open, as that of a real stream does
        self.lines = 0

    def __iter__(self) -> Iterator[Tensor]:
        for line in iter(self.file.readline, ""):
            self.lines += 1
            yield torch.tensor(float(line))


def test_files_lists_and_counters_of_a_dataset_are_put_back(tmp_path: Any) -> None:
    path = tmp_path / "numbers.txt"
    path.write_text("".join(f"{number}\n" for number in range(10)))
    stream = Stream(path)
    source = DataLoader(stream, batch_size=2)
    iterator = iter(source)
    assert next(iterator).tolist() == [0, 1]
    with undisturbed(source):
        assert next(iter(source)).tolist() == [2, 3]
        assert stream.lines == 4
    assert stream.lines == 2
    assert next(iter(source)).tolist() == [2, 3]
    stream.file.close()


def test_generators_of_a_collate_function_are_put_back() -> None:
    generator = np.random.default_rng(0)
    state = np.random.RandomState(0)
    numbers = random.Random(0)
    source = DataLoader(
        list(range(8)),  # type: ignore[arg-type]
        batch_size=8,
        collate_fn=lambda items: [generator.random(), state.rand(), numbers.random()],
    )
    with undisturbed(source):
        first = next(iter(source))
    assert next(iter(source)) == first
    assert next(iter(source)) != first


def test_state_is_put_back_after_an_error() -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    with contextlib.suppress(ZeroDivisionError), undisturbed([generator]):
        raise ZeroDivisionError(torch.rand(1, generator=generator))
    assert torch.equal(generator.get_state(), before)


def test_elements_of_a_batch_are_counted_once_in_any_nesting() -> None:
    class Carrier:
        def __init__(self) -> None:
            self.tensor = torch.zeros(5)

    shared = torch.zeros(2, 3)
    assert elements_in({"a": shared, "b": [shared, (torch.zeros(4), "text", None)], "c": Carrier()}) == 15
    assert describe([shared, torch.zeros(()), 3]) == "2x3, scalar"
    assert describe("no tensor") == "no tensors"
