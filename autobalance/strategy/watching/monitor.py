"""`BalanceMonitor`: what was predicted and what was reached, in the log and in the logger."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from autobalance.placement.contents import tensors_in
from autobalance.report.reached_table import reached_table
from autobalance.report.render import render
from autobalance.strategy.summary import tell
from autobalance.strategy.watching.clocks import Clock, Instant, now
from autobalance.strategy.watching.drift import above, in_words
from autobalance.strategy.watching.reached import ReachedPeaks
from autobalance.strategy.watching.stage_times import StageTimes
from autobalance.strategy.watching.visits import FirstVisits

if TYPE_CHECKING:
    from pytorch_lightning.callbacks import Callback as Base
else:
    Base = object

_GIB = 2**30
# Of a step, by whether the clock is that of the devices.
_LABELS = {True: "autobalance/step_time_s", False: "autobalance/host_step_time_s"}


class BalanceMonitor(Base):
    """Compare the plan of `strategy="self_balance"` with what the run reaches, for each device and each stage.

    After the first steps a table is logged once. The Trainer's loggers get, every `log_every_n_steps` steps,
    `autobalance/device_0/peak_gib`, `autobalance/device_0/predicted_peak_gib` and so on, `autobalance/step_time_s` and
    `autobalance/predicted_step_time_s` in seconds, and where devices have a clock `autobalance/stage_0/time_ms` and
    `autobalance/stage_0/predicted_ms` and so on: milliseconds that the stage's device works on a micro-batch, there and
    back. CUDA devices have one, and simulated ones after `torch.simulated.reset_clock()`; before that the seconds that
    the host computes for them are `autobalance/host_step_time_s`, which nothing predicts. A step is timed from the
    batch's start to its end, with the optimizer's step, which the prediction leaves out. What drifts from the plan is
    said once: peaks more than 5 % above it, and blocks that are called in another order, or not at all.
    `SelfBalanceStrategy(rebalance=True)` plans again.

    The devices' own peak counters start again with every window of steps. Batches that flow together, as those of an
    `accumulate_grad_batches` window do, have their times at the first of them.

    Example:
        Trainer(strategy="self_balance", devices=4, callbacks=[autobalance.BalanceMonitor()])

    Args:
        after: training batches until the table is logged; optimizer state is there from the second step on.

    Raises:
        ValueError: `after` is less than 1.
    """

    def __init__(self, after: int = 3) -> None:
        super().__init__()
        if after < 1:
            raise ValueError(f"`after={after!r}`: the table needs a batch at least; choose a number from 1 on.")
        self.after = after
        self._peaks: ReachedPeaks | None = None
        self._visits: FirstVisits | None = None
        self._times: StageTimes | None = None
        self._took: tuple[float | None, ...] = ()
        self._seen = 0
        self._started = Instant(Clock.WALL, 0.0)
        self._said: set[str] = set()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Look for a plan."""
        self._peaks, self._seen, self._took = None, 0, ()
        self._said.clear()
        if getattr(trainer.strategy, "plan", None) is None:
            warnings.warn(
                f"BalanceMonitor has nothing to compare: the Trainer's strategy is "
                f"{type(trainer.strategy).__name__}, which has no plan. Use strategy='self_balance'.",
                stacklevel=2,
            )
            return
        self._visits = FirstVisits(pl_module, trainer.strategy.plan.block_names)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A step begins: start its clock."""
        if self._visits is None:
            return
        if self._peaks is None or self._peaks.plan is not trainer.strategy.plan:
            self._peaks = ReachedPeaks(trainer.strategy, tensors_in(batch, in_objects=True))
            self._time_stages(pl_module, trainer.strategy)
        self._visits.start_again()
        if self._times is not None:
            self._times.start_again()
        self._started = now(trainer.strategy.parallel_devices)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A step has ended: compare."""
        if self._visits is None or self._peaks is None:
            return
        plan = trainer.strategy.plan
        seconds, clock = self._started.until(now(trainer.strategy.parallel_devices)), self._started.clock
        self._seen += 1
        if self._peaks.plan is not plan:
            return  # made anew in the midst of the step
        reached = self._peaks.read()
        if self._times is not None:
            self._took = self._times.read() or self._took
        if self._seen == self.after:
            tell(trainer, "\n" + render(reached_table(plan, reached, seconds, clock.value, self._took)))
        self._say_drift(plan, reached)
        if self._seen % trainer.log_every_n_steps == 0:
            self._log(trainer, plan, reached, {} if seconds is None else {_LABELS[clock.is_of_devices]: seconds})
            self._peaks.start_again()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the hooks off."""
        self._stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Take the hooks off."""
        self._stop()

    def _time_stages(self, module: Any, strategy: Any) -> None:
        """Time those of the present plan."""
        if self._times is not None:
            self._times.remove()
        self._times, self._took = StageTimes(module, strategy.plan, strategy.parallel_devices), ()

    def _stop(self) -> None:
        for hooked in (self._visits, self._times):
            if hooked is not None:
                hooked.remove()
        self._visits = self._times = self._peaks = None

    def _say_drift(self, plan: Any, reached: tuple[int, ...]) -> None:
        assert self._visits is not None
        if reached and (beyond := above(plan, reached)):
            self._say_once("peaks", f"{in_words(plan, beyond)}. A later step may run out of memory")
        if other := self._visits.other_order():
            self._say_once("order", f"{other}. The plan's times and peaks are those of the order that was profiled")

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(
                f"The run drifts from its plan: {text}; SelfBalanceStrategy(rebalance=True) plans again when that "
                f"happens, `worst_batch=` plans for another batch from the start.",
                stacklevel=2,
            )

    def _log(self, trainer: Any, plan: Any, reached: tuple[int, ...], times: dict[str, float]) -> None:
        values = {**times, "autobalance/predicted_step_time_s": plan.step_time}
        for index, predicted in enumerate(plan.peaks):
            values[f"autobalance/device_{index}/predicted_peak_gib"] = predicted / _GIB
        for index, peak in enumerate(reached):
            values[f"autobalance/device_{index}/peak_gib"] = peak / _GIB
        for index, (stage, took) in enumerate(zip(plan.stages, self._took, strict=False)):
            values[f"autobalance/stage_{index}/predicted_ms"] = 1e3 * stage.busy
            if took is not None:
                values[f"autobalance/stage_{index}/time_ms"] = 1e3 * took
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
