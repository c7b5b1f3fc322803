"""How long a plan of 500 blocks takes, and how much memory: one and two kinds of devices, 8 and 64 of them.

Run it by hand: `OMP_NUM_THREADS=1 python tests/benchmarks/plan_speed.py`. Every case is planned three times in a
process of its own, from a profile that is new each time; the fastest counts, and the resident memory of the process. On
a machine that does other work, seconds of the CPU tell what a plan takes alone.

Blocks are drawn at random: their times from a lognormal distribution, their bytes uniformly. Budgets leave 30 % above
what an even split of the whole would take on average; where blocks may be recomputed, far less than keeping all takes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import autobalance
from autobalance.devices.device import Device
from autobalance.errors import InfeasiblePlanError

BLOCKS = 500
MEGABYTE = 10**6
RESIDENT = 2**30
TRIES = 3
# Second kind of device: slower by this factor, and with this share of the memory.
SLOWER, SMALLER = 1.7, 0.6


@dataclass(frozen=True)
class Case:
    """What is planned, and the seconds that it may take."""

    policy: str
    devices: int
    kinds: int
    limit: float
    recompute: bool = False

    @property
    def micro_batches(self) -> int:
        """Four for each device keep most of them busy."""
        return 4 * self.devices

    @property
    def words(self) -> str:
        """What is planned, in words."""
        kinds = "one kind" if self.kinds == 1 else "two kinds"
        return f"{self.policy}{', recompute' * self.recompute}, {self.devices} devices of {kinds}"


CASES = [
    *(Case("balanced", devices, kinds, limit) for devices, limit in ((8, 0.1), (64, 1.0)) for kinds in (1, 2)),
    *(Case("auto", devices, kinds, limit) for devices, limit in ((8, 0.3), (64, 5.0)) for kinds in (1, 2)),
    *(Case("auto", 8, kinds, 1.5, recompute=True) for kinds in (1, 2)),
]


def main() -> int:
    """Plan every case, and say whether it kept its limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the blocks (default: %(default)s)")
    parser.add_argument("--profile", type=int, metavar="CASE", help="where one case spends its time, by functions")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_planned(Case(**json.loads(options.one)), options.seed)))
        return 0
    if options.profile is not None:
        _show_functions(CASES[options.profile], options.seed)
        return 0
    table = Table("", "plan", "seconds", "of the CPU", "limit", "resident", "result", title=f"{BLOCKS} blocks, 1F1B")
    kept = True
    for number, case in enumerate(CASES):
        found = _in_a_process(case, options.seed)
        within = found["seconds"] <= case.limit and found["resident"] <= RESIDENT and found["fits"]
        kept &= within
        table.add_row(
            str(number),
            case.words,
            f"{found['seconds']:.3f}",
            f"{found['CPU seconds']:.3f}",
            f"{case.limit:.1f}{'' if within else ' missed'}",
            f"{found['resident'] / 2**20:.0f} MiB",
            found["result"],
        )
    Console(width=140).print(table)
    print("limits kept" if kept else "a limit was missed")
    return 0 if kept else 1


def _in_a_process(case: Case, seed: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", json.dumps(asdict(case)), "--seed", str(seed)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _planned(case: Case, seed: int) -> dict[str, Any]:
    seconds, of_the_cpu, result, fits = [], [], "", True
    for _ in range(TRIES):
        profile, devices = _question(case, seed)
        start, start_of_the_cpu = time.perf_counter(), time.process_time()
        try:
            plan = _plan(case, profile, devices)
        except InfeasiblePlanError:
            result, fits = "no plan", False
        else:
            result = f"{plan.objective} {plan.value:.4f}, {'optimal' if plan.optimal else f'gap {plan.gap:.1%}'}"
        seconds.append(time.perf_counter() - start)
        of_the_cpu.append(time.process_time() - start_of_the_cpu)
    return {
        "seconds": min(seconds),
        "CPU seconds": min(of_the_cpu),
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "result": result,
        "fits": fits,
    }


def _plan(case: Case, profile: autobalance.Profile, devices: list[Device]) -> autobalance.Plan:
    return autobalance.plan(
        profile,
        devices,
        policy=case.policy,
        micro_batches=case.micro_batches,
        schedule="1f1b",
        recompute=case.recompute,
        cache=False,
    )


def _question(case: Case, seed: int) -> tuple[autobalance.Profile, list[Device]]:
    rng = np.random.default_rng(seed)
    work = rng.lognormal(0, 0.6, BLOCKS) / 1e3
    transfer, static, saved, transient = (
        rng.uniform(least, most, BLOCKS) * MEGABYTE for least, most in ((1, 20), (5, 60), (10, 60), (5, 30))
    )
    parts = case.micro_batches
    profile = autobalance.Profile.from_costs(
        static.round().tolist(),
        saved=(parts * saved.round()).tolist(),
        transient=(parts * transient.round()).tolist(),
        forward_time=(parts * work / 3).tolist(),
        backward_time=(parts * work * 2 / 3).tolist(),
        transfer=(parts * transfer.round())[:-1].tolist(),
        batch_size=parts,
    )
    kept = 0.55 if case.recompute else 1.25
    whole = 1.3 * (1.15 * static.sum() + kept * saved.sum() * case.devices / 2)
    slow = case.devices // 2 if case.kinds == 2 else 0
    share = whole / (case.devices - slow + SMALLER * slow)
    fast = [Device(f"fast {at}", int(share), flops=1e13, link=2e11) for at in range(case.devices - slow)]
    return profile, [
        *fast,
        *(Device(f"slow {at}", int(SMALLER * share), flops=1e13 / SLOWER, link=2e11) for at in range(slow)),
    ]


def _show_functions(case: Case, seed: int) -> None:
    import cProfile
    import pstats

    autobalance.plan(autobalance.Profile.from_costs([1, 1]), [2, 2])  # what is imported first does not count
    profile, devices = _question(case, seed)
    with cProfile.Profile() as functions:
        _plan(case, profile, devices)
    pstats.Stats(functions).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    sys.exit(main())
