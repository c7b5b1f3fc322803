"""How long a profile of a large language model takes, and how much memory: both steps of training with AdamW.

Run it by hand: `python tests/benchmarks/trace_speed.py`. Every shape is profiled in a process of its own, after its
imports; models are on meta, so resident memory is that of the trace. A profile spliced from one of three layers is
compared with the trace of all layers. On a machine that does other work, seconds of the CPU tell what it takes alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, build, loss

import autobalance
from autobalance.timelines.splice import repeated

SECONDS = {"Llama-7B": 4.0, "BLOOM-176B": 8.0}
RESIDENT = 2 * 2**30
DIGITS = 1e-5


def main() -> int:
    """Profile every shape, and say whether it kept its limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="cuda", help="whose kernels (default: %(default)s)")
    parser.add_argument("--one", choices=SHAPES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_profiled(options.one, options.target)))
        return 0
    table = Table(
        "shape", "parameters", "seconds", "of the CPU", "limit", "resident", "file", "peak, step 1", "step 2", "spliced"
    )
    kept = True
    for name in SHAPES:
        found = _in_a_process(name, options.target)
        kept &= found["seconds"] <= SECONDS[name] and found["resident"] <= RESIDENT and found["apart"] <= DIGITS
        table.add_row(
            name,
            f"{found['parameters'] / 1e9:.2f} B",
            f"{found['seconds']:.2f}",
            f"{found['CPU seconds']:.2f}",
            f"{SECONDS[name]:.0f}",
            f"{found['resident'] / 2**30:.2f} GiB",
            f"{found['file'] / 1e3:.0f} kB",
            *(f"{peak / 2**30:.3f} GiB" for peak in found["peaks"]),
            f"{found['apart']:.1e} apart, {found['spliced seconds']:.2f} s",
        )
    Console(width=140).print(table)
    print("limits kept" if kept else "a limit was missed")
    return 0 if kept else 1


def _in_a_process(name: str, target: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name, "--target", target]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _profiled(name: str, target: str) -> dict[str, Any]:
    shape = SHAPES[name]
    model, batch = build(shape)
    start, start_of_the_cpu = time.perf_counter(), time.process_time()
    profile = autobalance.profile(model, batch, optimizer=torch.optim.AdamW, step=loss, target=target)
    seconds, of_the_cpu = time.perf_counter() - start, time.process_time() - start_of_the_cpu
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        profile.save(path)
        size = path.stat().st_size
    peaks = [profile.peak(1), profile.peak(2)]
    start = time.perf_counter()
    spliced = _spliced(name, target)
    spliced_seconds = time.perf_counter() - start
    apart = [abs(spliced.peak(step) / peak - 1) for step, peak in zip((1, 2), peaks, strict=True)]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": seconds,
        "CPU seconds": of_the_cpu,
        "resident": resident,
        "file": size,
        "peaks": peaks,
        "apart": max(apart),
        "spliced seconds": spliced_seconds,
    }


def _spliced(name: str, target: str) -> autobalance.Profile:
    """From a trace of three layers."""
    model, batch = build(replace(SHAPES[name], layers=3))
    profile = autobalance.profile(model, batch, optimizer=torch.optim.AdamW, step=loss, target=target)
    return repeated(profile, "layers.1", SHAPES[name].layers - 3)


if __name__ == "__main__":
    sys.exit(main())
