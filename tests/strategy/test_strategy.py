"""The strategy itself: one process, the root device, gradients, models that no device could hold, refusals."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from models import CASES, Layer, adamw, loader
from torch import Tensor, nn

import autobalance

pytestmark = pytest.mark.usefixtures("simulated")

WIDTH = 64


def big(lightning: ModuleType) -> Any:
    """Four equal blocks of 200 KB, with as much for gradients: 1.6 MB in all."""

    class Big(lightning.LightningModule):
        built_on: str = ""

        def configure_model(self) -> None:
            if not hasattr(self, "layers"):
                self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(4))
                type(self).built_on = str(self.layers[0].norm_1.weight.device)

        def self_balance(self) -> list[nn.Module]:
            return list(self.layers)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for layer in self.layers:
                batch = layer(batch)
            return batch.pow(2).mean()

        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    return Big()


def batches(count: int = 2) -> Any:
    return loader([torch.randn(2, 8, WIDTH) for _ in range(count)])


def test_no_device_ever_holds_the_whole_model(
    lightning: ModuleType, trainer: Callable[..., Any], tmp_path: Path
) -> None:
    unlimited = trainer()
    unlimited.fit(big(lightning), batches())
    peaks = unlimited.strategy.plan.peaks
    gc.collect()
    with autobalance.simulate([peak + 4096 for peak in peaks]):
        weights = sum(p.numel() * 4 for p in nn.ModuleList(Layer(WIDTH) for _ in range(4)).parameters())
        assert max(peaks) < weights  # so that gathering weights anywhere would run out of memory
        made, model = trainer(), big(lightning)
        made.fit(model, batches())
        made.save_checkpoint(tmp_path / "big.ckpt")
        made.test(model, batches(), verbose=False)
        resumed = trainer(max_epochs=2)
        resumed.fit(big(lightning), batches(), ckpt_path=tmp_path / "big.ckpt")
        assert resumed.global_step == 4
        assert type(model).built_on == "cpu"
        for device in range(4):
            assert torch.simulated.max_memory_allocated(device) <= peaks[device] + 4096


def test_a_model_that_fits_nowhere_is_refused_before_anything_is_moved(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    model = big(lightning)
    with autobalance.simulate("4x128KiB"):
        made = trainer()
        with pytest.raises(autobalance.InfeasiblePlanError) as caught:
            made.fit(model, batches())
        assert len(caught.value.shortfall) == 4
        assert min(caught.value.shortfall) > 0
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())
        assert [torch.simulated.memory_allocated(index) for index in range(4)] == [0, 0, 0, 0]
    made = trainer()
    made.fit(model, batches())  # the failed fit leaves nothing behind
    assert made.global_step == 2


def test_a_run_that_runs_out_of_memory_can_be_repeated(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    model = big(lightning)
    first = trainer()
    first.fit(model, batches())
    plan = first.strategy.plan
    with autobalance.simulate([max(plan.peaks) // 2] * 4):
        hopeful = plan.with_peaks([0] * 4)  # the plan itself would be refused on devices that are too small for it
        failing = trainer(strategy=autobalance.SelfBalanceStrategy(plan=hopeful))
        with pytest.raises(torch.OutOfMemoryError):
            failing.fit(model, batches())
        assert not any(part._forward_pre_hooks for part in model.modules())
    trainer().fit(model, batches())


@pytest.mark.parametrize("kind", ["initialised", "resumed"])
def test_a_model_on_meta_trains(lightning: ModuleType, trainer: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    source = trainer()
    source.fit(big(lightning), batches(3))
    source.save_checkpoint(tmp_path / "source.ckpt")
    model, made = big(lightning), trainer(max_epochs=2)
    with made.init_module(empty_init=True):
        model.configure_model()
    assert all(parameter.is_meta for parameter in model.parameters())
    made.fit(model, batches(3), ckpt_path=tmp_path / "source.ckpt" if kind == "resumed" else None)
    assert made.global_step == 6
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())

    if kind == "resumed":
        torch.manual_seed(11)
        tested, plain = big(lightning), big(lightning)
        with made.init_module(empty_init=True):
            tested.configure_model()
        made.test(tested, batches(), ckpt_path=tmp_path / "source.ckpt", verbose=False)
        plain.configure_model()
        plain.load_state_dict(torch.load(tmp_path / "source.ckpt", weights_only=True)["state_dict"])
        for name, value in plain.state_dict().items():
            assert torch.equal(tested.state_dict()[name], value), name


def test_stale_gradients_are_gone_before_the_forward(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    def run(model: Any, **options: Any) -> list[int]:
        held: list[int] = []
        step = type(model).training_step

        def watching(self: Any, batch: Any, batch_idx: int) -> Tensor:
            if self.trainer.__class__.__name__ == "Trainer":  # not in a trial
                held.append(sum(parameter.grad is not None for parameter in self.parameters()))
            return step(self, batch, batch_idx)

        type(model).training_step = watching
        trainer(**options).fit(model, loader(CASES["sum of branches"].batches(4)))
        return [count > 0 for count in held]

    def small() -> Any:
        return CASES["sum of branches"].make(lightning.LightningModule)

    assert run(small()) == [False] * 4
    assert run(small(), accumulate_grad_batches=2) == [False, True, False, True]
    looking = small()
    type(looking).on_before_zero_grad = lambda self, optimizer: None
    assert run(looking) == [False, True, True, True]


@pytest.mark.both_packages
def test_batch_loss_and_module_are_on_the_root_device(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    seen: dict[str, str] = {}

    class Look(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.update(loss=str(outputs["loss"].device), batch=str(batch[0].device), module=str(module.device))
            seen.update(last=str(module.head.weight.device), root=str(trainer.strategy.root_device))

    for policy, root in (("balanced", None), ("balanced_low_0", "simulated:0")):
        made = trainer(strategy=autobalance.SelfBalanceStrategy(policy=policy), callbacks=[Look()])
        made.fit(CASES["gpt"].make(lightning.LightningModule, adamw), loader(CASES["gpt"].batches(1)))
        assert {seen[name] for name in ("batch", "loss", "module", "root")} == {root or seen["last"]}
        assert made.strategy.root_device.index == made.strategy.plan.root


def test_a_plan_can_be_given_or_read(lightning: ModuleType, trainer: Callable[..., Any], tmp_path: Path) -> None:
    first = trainer()
    first.fit(big(lightning), batches())
    plan = first.strategy.plan
    plan.save(tmp_path / "plan.json")
    for given in (plan, str(tmp_path / "plan.json"), tmp_path / "plan.json"):
        made = trainer(strategy=autobalance.SelfBalanceStrategy(plan=given))
        made.fit(big(lightning), batches())
        assert made.strategy.plan == plan
    with pytest.raises(ValueError, match=r"the plan is for 4 devices, but the Trainer has 2: set Trainer\(devices=4\)"):
        trainer(devices=2, strategy=autobalance.SelfBalanceStrategy(plan=plan)).fit(big(lightning), batches())
    larger = loader([torch.randn(4, 8, WIDTH)])
    with pytest.raises(
        ValueError, match=r"for batches of float32\[2,8,64\], but here they are of float32\[4,8,64\], 2,048 "
    ):
        trainer(strategy=autobalance.SelfBalanceStrategy(plan=plan)).fit(big(lightning), larger)
    other = CASES["gpt"].make(lightning.LightningModule)
    with pytest.raises(ValueError, match="the plan was made for other blocks than the model has"):
        trainer(strategy=autobalance.SelfBalanceStrategy(plan=plan)).fit(other, loader(CASES["gpt"].batches(1)))
    assert all(parameter.device.type == "cpu" for parameter in other.parameters())


def test_another_model_gets_another_plan(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    made = trainer()
    model = big(lightning)
    made.fit(model, batches())
    first = made.strategy.plan
    made.fit_loop.epoch_progress.reset()
    made.fit(CASES["gpt"].make(lightning.LightningModule), loader(CASES["gpt"].batches(1)))
    assert made.strategy.plan.block_names != first.block_names
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.both_packages
def test_it_is_one_process_that_samples_everything(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    strategy = trainer().strategy
    assert (strategy.world_size, strategy.global_rank, strategy.local_rank, strategy.node_rank) == (1, 0, 0, 0)
    assert strategy.is_global_zero
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    value = torch.ones(1)
    assert strategy.reduce(value) is strategy.all_gather(value) is strategy.broadcast(value) is value
    assert strategy.reduce_boolean_decision(True)
    assert not strategy.reduce_boolean_decision(False)
    strategy.barrier("anything")


@pytest.mark.both_packages
def test_several_nodes_are_refused(trainer: Callable[..., Any]) -> None:
    with pytest.raises(
        ValueError, match=r"num_nodes=2\): strategy 'self_balance' spreads a model over the devices of one"
    ):
        trainer(num_nodes=2)


@pytest.mark.both_packages
@pytest.mark.parametrize(
    ("environment", "name"),
    [
        (
            {"RANK": "0", "GROUP_RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
            | {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "TorchElasticEnvironment",
        ),
        (
            {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train"}
            | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
            "SLURMEnvironment",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*srun.*")
def test_several_processes_are_refused(
    trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], name: str
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(
        ValueError, match=f"{name} has started 2 processes, but strategy 'self_balance' runs all devices"
    ):
        trainer()


def test_the_table_is_logged_once_and_not_without_a_summary(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str]
) -> None:
    summary = lightning.callbacks.ModelSummary(max_depth=0)
    made = trainer(enable_model_summary=True, callbacks=[summary])
    model = big(lightning)
    made.fit(model, batches())
    made.test(model, batches(), verbose=False)
    tables = [message for message in messages if "layers.3" in message]
    assert len(tables) == 1
    assert str(made.strategy.plan) in tables[0]
    messages.clear()
    trainer().fit(big(lightning), batches())
    assert not any("layers.3" in message for message in messages)


def test_parameters_unfrozen_after_planning_are_said_once(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    model = CASES["gpt"].make(lightning.LightningModule, adamw)
    model.embed.requires_grad_(False)
    model.position.requires_grad_(False)

    class Unfreeze(lightning.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.embed.requires_grad_(trainer.current_epoch > 0)

    made = trainer(callbacks=[Unfreeze()], max_epochs=3)
    with pytest.warns(UserWarning, match=r"1 parameter\(s\) have become trainable .*\(embed.weight\)") as caught:
        made.fit(model, loader(CASES["gpt"].batches(1)))
    assert len([each for each in caught if "become trainable" in str(each.message)]) == 1
    planned = made.strategy.plan
    made.fit_loop.max_epochs = 4
    made.fit(model, loader(CASES["gpt"].batches(1)))
    assert made.strategy.plan is not planned, "the next fit is planned anew"
