"""Measures one device: what a process takes on it beside tensors, and how fast it computes, reads and sends."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import autobalance
from autobalance import compat
from autobalance.measuring.calibration import Calibration, Identity
from autobalance.measuring.meters import Meter, make_meter

REPEATS = 5
ENOUGH = 0.02  # seconds: what takes so long is measured well
LARGEST_MATRIX = 8192
LARGEST_COPY = 256 * 2**20  # bytes
LAUNCHES = 1000

_ASK_FOR_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")

_PROCESS = """
import sys, torch
device = torch.device(sys.argv[1])
x = torch.ones(64, 64, device=device, requires_grad=True)
(x @ x).sum().backward()
torch.nn.functional.conv2d(torch.ones(1, 8, 16, 16, device=device), torch.ones(8, 8, 3, 3, device=device)).sum().item()
print(torch.cuda.memory_reserved(device), flush=True)
sys.stdin.read()
"""


def present_devices() -> list[str]:
    """All GPUs of this machine.

    Raises:
        ValueError: there is none.
    """
    if not torch.cuda.is_available():
        raise ValueError("this machine has no GPU to calibrate; name a device, such as 'cpu'")
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def identity_of(device: str) -> Identity:
    """What a calibration of a device holds for.

    Args:
        device: as torch names it.

    Raises:
        ValueError: the device is not there.
    """
    there = make_meter(device).device
    if there.type == "cuda":
        name, driver = torch.cuda.get_device_name(there), driver_version()
    else:
        name, driver = there.type, ""  # simulated devices are all alike
    return Identity(name, driver, torch.__version__, autobalance.__version__)


def driver_version(command: Sequence[str] = _ASK_FOR_DRIVER) -> str:
    """The version of the GPU driver, "unknown" where its tool cannot be asked.

    Args:
        command: prints it.
    """
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return told.strip().splitlines()[0] if told.strip() else "unknown"


def probe(device: str, identity: Identity) -> Calibration:
    """Measure a device by itself.

    Args:
        device: as torch names it.
        identity: what the figures hold for.
    """
    meter = make_meter(device)
    is_gpu = meter.device.type == "cuda"
    context = (
        context_bytes(
            lambda: torch.cuda.mem_get_info(meter.device)[0], [sys.executable, "-c", _PROCESS, str(meter.device)]
        )
        if is_gpu
        else 0
    )
    kinds = ("float32", "tf32", "bfloat16", "float16") if is_gpu else ("float32", "bfloat16")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        workspaces = _workspaces(meter)
        flops = {kind: _matrix_rate(meter, kind) for kind in kinds}
        bandwidth = _best_rate(lambda nbytes: _copying(meter, nbytes), 2**20, LARGEST_COPY)
        launch_time = _launch_time(meter)
    compat.drop_cuda_workspaces(meter.device)
    return Calibration(identity, context, workspaces, flops, bandwidth, launch_time)


def probe_links(devices: Sequence[str]) -> dict[tuple[int, str], float]:
    """Bytes per second between every two devices, one way.

    Args:
        devices: as torch names them.

    Returns:
        The rate by (position of the source in `devices`, indices of both as "0>1").
    """
    meters = [make_meter(device) for device in devices]
    return {
        (position, f"{source.device.index}>{target.device.index}"): _best_rate(
            lambda nbytes, source=source, target=target: _sending(source, target, nbytes),  # type: ignore[misc]  # binds the loop's pair
            2**20,
            LARGEST_COPY,
        )
        for position, source in enumerate(meters)
        for target in meters
        if target.device != source.device
    }


def context_bytes(free: Callable[[], int], command: Sequence[str]) -> int:
    """Bytes that a process takes on a device beside what its allocator has reserved there.

    It is another process that is looked at, for the present one may have taken its own already.

    Args:
        free: bytes that are free on the device.
        command: starts a process that uses the device, prints the bytes it has reserved, and stays until its input
            ends.
    """
    before = free()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reserved = int(process.stdout.readline())
        after = free()
        process.communicate()
    return max(0, before - after - reserved)


def _workspaces(meter: Meter) -> int:
    """Bytes that matrix products leave behind, of the forward's thread and of the backward's."""
    compat.drop_cuda_workspaces(meter.device)
    before = meter.allocated()
    for dtype in (torch.float32, torch.bfloat16):
        with torch.enable_grad():
            x = torch.ones(64, 64, device=meter.device, dtype=dtype, requires_grad=True)
            (x @ x).sum().backward()
        del x
    return meter.allocated() - before


def _best_rate(work_and_time: Callable[[int], tuple[float, float]], smallest: int, largest: int) -> float:
    """Work per second at the size where it is highest, of sizes doubled until one takes long enough."""
    best, size = 0.0, smallest
    while True:
        done, took = work_and_time(size)
        best = max(best, done / max(took, 1e-9))
        if took > ENOUGH or size >= largest:
            return best
        size *= 2


def _matrix_rate(meter: Meter, kind: str) -> float:
    def product(size: int) -> tuple[float, float]:
        with _tf32(kind == "tf32"):
            dtype = torch.float32 if kind == "tf32" else getattr(torch, kind)
            one = torch.randn(size, size, device=meter.device).to(dtype)
            return 2.0 * size**3, _median(meter, lambda: one @ one)

    return _best_rate(product, 128, LARGEST_MATRIX)


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def _copying(meter: Meter, nbytes: int) -> tuple[float, float]:
    source = torch.ones(nbytes // 4, device=meter.device)
    target = torch.empty_like(source)
    return 2.0 * nbytes, _median(meter, lambda: target.copy_(source))  # it is read and written


def _sending(source: Meter, target: Meter, nbytes: int) -> tuple[float, float]:
    tensor = torch.ones(nbytes // 4, device=source.device)
    return float(nbytes), _median(source, lambda: tensor.to(target.device))


def _median(meter: Meter, work: Callable[[], Any]) -> float:
    work()
    return statistics.median(meter.seconds(work) for _ in range(REPEATS))


def _launch_time(meter: Meter) -> float:
    """Seconds that the host takes for a kernel, while the device keeps up."""
    one = torch.zeros(1, device=meter.device)
    for _ in range(10):
        one.add_(1)
    torch.get_device_module(meter.device).synchronize(meter.device)
    start = time.perf_counter()
    for _ in range(LAUNCHES):
        one.add_(1)
    return (time.perf_counter() - start) / LAUNCHES
