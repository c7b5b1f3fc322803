from __future__ import annotations

import subprocess
import sys


def test_planning_imports_no_torch_and_no_lightning() -> None:
    code = """
import sys, pkgutil, importlib
import autobalance.partitioning, autobalance.report, autobalance.devices
import autobalance.schedules, autobalance.timelines
import autobalance.units, autobalance.errors, autobalance.profiling.profile, autobalance.profiling.timeline
rooms = autobalance.partitioning, autobalance.report, autobalance.devices, autobalance.schedules, autobalance.timelines
for room in rooms:
    for module in pkgutil.iter_modules(room.__path__):
        importlib.import_module(f"{room.__name__}.{module.name}")
from autobalance.partitioning.search import plan
from autobalance.profiling.profile import Profile
print(plan(Profile.from_costs([4, 4]), [8, 8]))
heavy = {"torch", "lightning", "pytorch_lightning", "scipy"} & sys.modules.keys()
assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "2 blocks on 2 devices" in result.stdout
