"""`accelerator="simulated"`: lets an unmodified Trainer run on devices that are not there."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from autobalance.compat import TrainerChoice, call_before_strategy_is_chosen
from autobalance.simulated import backend
from autobalance.simulated.configure import ENVIRONMENT_VARIABLE, from_environment, simulate
from autobalance.strategy.precision import match_device, mixed_precision
from autobalance.strategy.registration import STRATEGY_NAME
from autobalance.units import format_size

if TYPE_CHECKING:
    from pytorch_lightning.accelerators import Accelerator as Base
else:
    Base = object


class SimulatedAccelerator(Base):
    """Simulated devices for the Trainer, as `autobalance.simulate` or `AUTOBALANCE_SIMULATE` describes them.

    Example:
        autobalance.simulate("4x96MiB")
        Trainer(accelerator="simulated", devices=4, strategy="self_balance")
    """

    lightning_package: str

    def setup_device(self, device: torch.device) -> None:
        """Make `device` the current one."""
        assert device.type == "simulated", device
        backend.set_device(device)

    def setup(self, trainer: Any) -> None:
        """Say that the run is on simulated devices."""
        devices = getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy.root_device]
        say = import_module(f"{self.lightning_package}.utilities.rank_zero").rank_zero_info
        say(_in_words([device.index for device in devices]))

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Bytes in use and the most that were, as `DeviceStatsMonitor` logs them."""
        return {
            "allocated_bytes.current": backend.memory_allocated(device),
            "allocated_bytes.peak": backend.max_memory_allocated(device),
        }

    def teardown(self) -> None:
        """Nothing to release: a simulated device's memory is freed with its tensors."""

    @classmethod
    def parse_devices(cls, devices: int | str | list[int]) -> list[int]:
        """Indices of the simulated devices to use; devices without a memory limit if nothing else is configured.

        Raises:
            ValueError: for devices that are not configured.
        """
        call_before_strategy_is_chosen(cls.lightning_package, check_choice)
        wanted = _indices(devices)
        if _configured() == 0:
            if not wanted:
                raise ValueError(f"Trainer(accelerator='simulated', devices={devices!r}): {_HOW_TO_CONFIGURE}")
            simulate(max(wanted) + 1)
        wanted = wanted or list(range(_configured()))
        if max(wanted) >= _configured():
            raise ValueError(
                f"Trainer(accelerator='simulated', devices={devices!r}) asks for device {max(wanted)}, but "
                f"{_configured()} simulated devices are configured, numbered from 0. {_HOW_TO_CONFIGURE}"
            )
        return wanted

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """The torch devices of these indices."""
        return [torch.device("simulated", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        """How many simulated devices are configured.

        Raises:
            ValueError: if there are none.
        """
        if _configured() == 0:
            raise ValueError(f"Trainer(accelerator='simulated', devices='auto'): {_HOW_TO_CONFIGURE}")
        return _configured()

    @staticmethod
    def is_available() -> bool:
        """Always: they need no hardware."""
        return True

    @staticmethod
    def name() -> str:
        """The name in the registry."""
        return "simulated"


def check_choice(choice: TrainerChoice) -> None:
    """Give Lightning's own strategy its simulated device and precision; refuse several devices without our strategy.

    Args:
        choice: what the Trainer has chosen so far.

    Raises:
        ValueError: for several simulated devices under a strategy that would start other processes for them.
    """
    if not isinstance(choice.accelerator, SimulatedAccelerator):
        return
    strategy, devices = choice.strategy, choice.devices
    ours = strategy == STRATEGY_NAME or getattr(strategy, "strategy_name", None) == STRATEGY_NAME
    if len(devices) > 1 and not ours:
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise ValueError(
            f"Trainer(accelerator='simulated', devices={len(devices)}) with strategy {name!r} would start "
            f"{len(devices)} processes, but simulated devices live in one. Use strategy='self_balance', or devices=1."
        )
    if not ours:
        choice.use_root_device(devices[0])  # Lightning gives every accelerator that it does not know the CPU
    if choice.precision_plugin is not None:
        match_device(choice.precision_plugin)
    elif choice.precision in ("16-mixed", "bf16-mixed"):
        choice.use_precision(mixed_precision(choice.package, choice.precision))


_HOW_TO_CONFIGURE = (
    f"Say which devices to simulate: autobalance.simulate('4x96MiB') before the Trainer, or the environment variable "
    f"{ENVIRONMENT_VARIABLE}=4x96MiB."
)


def _configured() -> int:
    """How many simulated devices there are; those that the environment names are configured if none are yet."""
    if backend.device_count() == 0:
        from_environment()
    return backend.device_count()


def _indices(devices: int | str | list[int]) -> list[int]:
    """Device indices as Lightning's Trainer takes them; none for all."""
    if isinstance(devices, str) and "," in devices:
        return [int(index) for index in devices.split(",") if index.strip()]
    if isinstance(devices, (list, tuple)):
        return [int(index) for index in devices]
    count = int(devices)
    return [] if count == -1 else list(range(count))


def _in_words(indices: list[int]) -> str:
    sizes = [backend.mem_get_info(index)[1] for index in indices]
    limits = "without a memory limit" if max(sizes) == sys.maxsize else f"of {', '.join(map(format_size, sizes))}"
    if len(set(sizes)) == 1 and sizes[0] != sys.maxsize:
        limits = f"of {format_size(sizes[0])}"
    devices = f"{len(indices)} simulated devices" if len(indices) > 1 else "1 simulated device"
    return f"Running on {devices} {limits}: real numbers, computed on the CPU."
