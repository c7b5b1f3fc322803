from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autobalance

PACKAGE = Path(autobalance.__file__).parent
ROOMS = ("partitioning", "timelines", "schedules", "devices")


def test_planning_imports_no_torch_and_no_lightning() -> None:
    code = """
import sys, pkgutil, importlib
import autobalance.partitioning, autobalance.report, autobalance.devices
import autobalance.schedules, autobalance.timelines
import autobalance.units, autobalance.errors, autobalance.profiling.profile, autobalance.profiling.timeline
rooms = autobalance.partitioning, autobalance.report, autobalance.devices, autobalance.schedules, autobalance.timelines
found = [module.name for room in rooms for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")]
for name in found:
    importlib.import_module(name)
from autobalance.partitioning.search import plan
from autobalance.profiling.profile import Profile
print(plan(Profile.from_costs([4, 4]), [8, 8]))
print(*found)
heavy = {"torch", "lightning", "pytorch_lightning", "scipy", "matplotlib"} & sys.modules.keys()
assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "2 blocks on 2 devices" in result.stdout
    for room in ("chains.sweep", "savings.knapsack", "orders.looped", "rivals.verdict"):
        assert f"autobalance.partitioning.{room}" in result.stdout, "rooms inside rooms are looked at too"


def _imports(tree: ast.Module) -> Iterator[str]:
    """Modules that are imported when the module itself is."""
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


@pytest.mark.parametrize("room", ROOMS)
def test_data_flows_from_profiles_to_plans_and_never_back(room: str) -> None:
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in (PACKAGE / room).rglob("*.py")
        for name in _imports(ast.parse(path.read_text()))
    }
    assert found
    behind = ("strategy", "placement", "report", "commands", "cli", "simulated")
    assert not {
        (path, name) for path, name in found if name.startswith(tuple(f"autobalance.{each}" for each in behind))
    }


def test_private_names_stay_in_their_modules() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        for name in _imports(ast.parse(path.read_text()))
        if name.startswith("autobalance.") and name.rpartition(".")[2].startswith("_")
    }
    assert not {(path, name) for path, name in found if name.rpartition(".")[2] != "__version__"}
