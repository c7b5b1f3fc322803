"""Simulated devices: real numbers on the CPU, the device checks, memory limits and byte counts of an accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autobalance.simulated.clock import device_at as device_at
    from autobalance.simulated.configure import Simulation as Simulation
    from autobalance.simulated.configure import from_environment as from_environment
    from autobalance.simulated.configure import simulate as simulate
    from autobalance.simulated.dispatch import charging as charging
    from autobalance.simulated.dispatch import observing as observing
    from autobalance.simulated.elements import fake_elements as fake_elements
    from autobalance.simulated.ledger import using_ledger as using_ledger
    from autobalance.simulated.tensor import SimulatedTensor as SimulatedTensor

_HOMES = {
    "SimulatedTensor": "tensor",
    "Simulation": "configure",
    "charging": "dispatch",
    "device_at": "clock",
    "fake_elements": "elements",
    "from_environment": "configure",
    "observing": "dispatch",
    "simulate": "configure",
    "using_ledger": "ledger",
}
__all__ = [
    "SimulatedTensor",
    "Simulation",
    "charging",
    "device_at",
    "fake_elements",
    "from_environment",
    "observing",
    "simulate",
    "using_ledger",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
