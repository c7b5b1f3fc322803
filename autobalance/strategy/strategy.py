"""`strategy="self_balance"`: one process, several devices, the user's own steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from autobalance.compat import call_around_closures, call_around_hooks, set_lightning_device
from autobalance.execution.naive import NaiveSchedule
from autobalance.strategy.one_process import OneProcess
from autobalance.strategy.optimizers import send_state_home
from autobalance.strategy.options import Options
from autobalance.strategy.parts.steps_in_parts import StepsInParts, steps_in_parts
from autobalance.strategy.placed import Placed
from autobalance.strategy.plain_checkpoints import PlainCheckpoints
from autobalance.strategy.planning.planning import plan_run, read_plan
from autobalance.strategy.planning.rebalance import rebalance
from autobalance.strategy.recovery.recovery import Recovery
from autobalance.strategy.registration import STRATEGY_NAME, lightning_root
from autobalance.strategy.scheduled_steps import ScheduledSteps
from autobalance.strategy.summary import log_plan
from autobalance.strategy.watching.drift import Drift

if TYPE_CHECKING:
    from autobalance.partitioning.plan import Plan
    from autobalance.strategy.planning.replan import Learned


class SelfBalanceStrategy(ScheduledSteps, PlainCheckpoints, OneProcess):
    """Spread the blocks of a LightningModule over the Trainer's devices: train what fits on none of them.

    Example:
        Trainer(strategy="self_balance", devices=4)
        Trainer(strategy=SelfBalanceStrategy(max_memory={0: "10GiB"}, pin={"head": 0}), devices=4)

    Everything runs in one process. The batch, the loss and `self.device` are on the device of the last block, so that
    targets, metrics and `self.log` need no change. `trainer.strategy.plan` tells what is where. Callbacks that keep a
    copy of the model keep it on that device, too, unless they are told otherwise: `WeightAveraging(device="cpu")`.

    Args:
        policy: "auto" takes the split with the least predicted step time, and of those within 2 % of it the one whose
            fullest device is least full; "balanced" levels the devices' relative use of memory; "balanced_low_0" keeps
            device 0 as free as it can, for batch and outputs; "sequential" fills one device after the other.
        max_memory: most bytes ("10GiB") on a device, by its position in the Trainer's `devices`.
        reserve: bytes to leave free on each device; "auto" is an allowance on real ones, nothing on simulated ones.
        pin: device position by block name.
        plan: a plan, or the path of a saved one, to use instead of making one.
        micro_batches: how many parts to split a batch into; "auto" is as many as make a step short; "accumulate" takes
            the batches that `accumulate_grad_batches` adds up as the parts of one step, as "auto" does where a batch is
            too small to be split.
        schedule: the order in which they run: "naive" takes batches whole, "gpipe", "1f1b" and "looped" overlap parts;
            "auto" chooses. Where splitting would train something else, batches stay whole, and the log says why.
        batch_norm: what to do about batch norm if a batch is split; "fallback" does not split it, "deferred" normalises
            each part by itself and keeps running statistics of the whole batch.
        recompute: whether blocks may run their forward again in the backward in place of keeping what it saves; "auto":
            where memory asks for it.
        offload: whether activations, weights and optimizer state may be kept on the host.
        worst_batch: the batch to plan for, or "scan:200" for the largest of the first 200; default: the first.
        retry_on_oom: whether a step that runs out of memory is planned anew, with what it has shown, and run again.
        rebalance: whether to plan again while training.
        accelerator: given by the Trainer, as are those that follow.
        parallel_devices: the devices.
        cluster_environment: must be that of one process.
        checkpoint_io: how to write files.
        precision_plugin: the precision.

    Raises:
        ValueError: for an option that does not exist, several nodes or processes, and if no plan fits the devices.
    """

    strategy_name = STRATEGY_NAME
    lightning_package: str

    def __init__(
        self,
        policy: str = "auto",
        max_memory: dict[int | str, int | str] | None = None,
        reserve: int | str | float = "auto",
        pin: dict[str, int] | None = None,
        plan: Any = None,
        micro_batches: int | str = "auto",
        schedule: str = "auto",
        batch_norm: str = "fallback",
        recompute: bool | str = "auto",
        offload: bool = False,
        worst_batch: Any = None,
        retry_on_oom: bool = True,
        rebalance: bool = False,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        self.options = Options(
            policy=policy,
            max_memory=max_memory,
            reserve=reserve,
            pin=pin,
            micro_batches=micro_batches,
            schedule=schedule,
            batch_norm=batch_norm,
            recompute=recompute,
            offload=offload,
            worst_batch=worst_batch,
            retry_on_oom=retry_on_oom,
            rebalance=rebalance,
        )
        self._schedule = NaiveSchedule(self.glue)
        self._given_plan = read_plan(plan)
        self._placed: Placed | None = None
        self._micro_batches: StepsInParts | None = None
        self._trainer: Any = None
        self._drift = Drift(self)
        self._recovery = Recovery(self, self._drift)
        self._undo_closures: Callable[[], None] = lambda: None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    # Planning and placing.

    @property
    def plan(self) -> Plan | None:
        """The plan of the present or last run; None before the first."""
        return self._placed.plan if self._placed is not None else self._given_plan

    @property
    def root_device(self) -> torch.device:
        """Where batch, loss and metrics are: on the last block's device; until there is a plan, on the last device."""
        assert self.parallel_devices, "the Trainer sets the devices"
        plan = self.plan
        if plan is None or plan.root >= len(self.parallel_devices):
            return self.parallel_devices[-1]
        return self.parallel_devices[plan.root]

    def connect(self, model: Any) -> None:
        """Take a model; the plan of another one is forgotten."""
        self.lightning_package = lightning_root(model) or self.lightning_package
        if self._placed is not None and self._placed.module() is not model:
            self._placed = None
        super().connect(model)

    def setup(self, trainer: Any) -> None:
        """Plan, place the blocks, then build optimizers on the placed parameters."""
        assert self.accelerator is not None
        self._trainer = trainer
        self._drift.begin(trainer)
        call_around_hooks(self.lightning_package, _glue_of)
        self.accelerator.setup(trainer)
        assert self.model is not None
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        fitting = trainer.state.fn == "fit"
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            send_state_home(self.optimizers)
            assert self._placed is not None
            assert self.parallel_devices
            self._placed.keep_state_on_host(self.optimizers, self.parallel_devices)
            self._undo_closures = call_around_closures(trainer, self._recovery.run)

    def model_to_device(self) -> None:
        """Plan unless this model's plan covers the run, and move block by block: the whole is never on one device."""
        devices = self.parallel_devices
        assert devices
        before = self._placed
        planned = plan_run(self._trainer, self.options, devices, given=self._given_plan, before=before)
        self._adopt(planned)
        if before is None or before.plan is not planned.plan:
            log_plan(planned.plan, self._trainer)

    def rebalance(self, learned: Learned, batch: Sequence[torch.Tensor] = ()) -> None:
        """Plan again between two steps, and move blocks, gradients and optimizer state: nothing is lost.

        Args:
            learned: what the run has shown of its needs.
            batch: tensors of the batch that comes next, which follow the root device.

        Raises:
            InfeasiblePlanError: if no plan fits; everything is as before then.
        """
        assert self._placed is not None
        devices = self.parallel_devices
        assert devices
        rebalance(self._trainer, self.options, devices, self._placed, learned, batch, self._adopt)
        log_plan(self._placed.plan, self._trainer)

    def _adopt(self, planned: Placed) -> None:
        """Make a plan the present one, and place the model by it."""
        assert self.accelerator is not None
        assert self.parallel_devices
        assert self.lightning_module is not None
        self._placed = planned
        self.accelerator.setup_device(self.root_device)
        set_lightning_device(self.lightning_module, self.root_device)
        planned.place(self.parallel_devices)
        if self._micro_batches is not None:
            self._micro_batches.remove()
        self._micro_batches = steps_in_parts(self._trainer, planned, self.glue, self.options.batch_norm)

    def teardown(self) -> None:
        """Take the hooks off, then bring everything back to the host."""
        if self._placed is not None:
            self._placed.remove()
        if self._micro_batches is not None:
            self._micro_batches.remove()
        self._undo_closures()
        self._recovery.forget()
        self._drift.forget()
        self._trainer = self._micro_batches = None
        super().teardown()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Models are built on the host, or on meta where `empty_init` asks for it: no one device could hold them."""
        with torch.device("meta" if empty_init else "cpu"), self.precision_plugin.tensor_init_context():
            yield

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Send home what callbacks have made anew on the root device, and see whether the plan still covers the run."""
        super().on_train_batch_start(batch, batch_idx)
        assert self._placed is not None
        if self._micro_batches is None or not self._micro_batches.is_in_window:
            self._drift.look(batch, self._placed.elements)
        if batch_idx == 0:
            self._placed.send_buffers_home()
            self._placed.check_trainable()
        self._placed.check_batch(batch)

    def glue(self) -> AbstractContextManager[None]:
        """A context in which the user's operations outside blocks run where their operands are."""
        return nullcontext() if self._placed is None else self._placed.glue()


def _glue_of(trainer: Any) -> AbstractContextManager[None]:
    """The glue of a Trainer with this strategy, or of a trial of it; of any other, nothing."""
    glue: Callable[[], AbstractContextManager[None]] = getattr(trainer.strategy, "glue", nullcontext)
    return glue()
