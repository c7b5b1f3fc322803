"""Everything that makes torch know simulated devices, done once and at the first use, never on import."""

from __future__ import annotations

from autobalance import compat
from autobalance.simulated import (
    autocast,
    backend,
    kernels,
    lacking,
    layouts,
    loading,
    pending,
    pinning,
    recurrent,
    refusals,
    results,
    streams,
    tensor,
)


def install() -> None:
    """Register the device type with all that belongs to it; a second call does nothing."""
    if backend.is_registered():
        return
    backend.register()
    kernels.register()
    lacking.register()
    layouts.register()
    recurrent.register()
    refusals.register()
    results.register()
    autocast.register()
    pinning.register()
    loading.register()
    streams.register()
    compat.single_threaded_backward(pending.raising)
    compat.support_foreach(tensor.SimulatedTensor)  # the default of optimizers, as on CUDA
    compat.set_data_hook(tensor.involves_simulated, tensor.assign_data)
