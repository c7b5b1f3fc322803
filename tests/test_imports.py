"""What importing the package costs and brings along, and what the installed distribution says about itself."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from importlib import metadata

import pytest

import autobalance

LIGHTNING = ("pytorch_lightning", "lightning")


def modules() -> list[str]:
    found = pkgutil.walk_packages(autobalance.__path__, prefix="autobalance.")
    return [module.name for module in found if "._examples" not in module.name and not module.name.endswith("__main__")]


def imported_by(code: str) -> set[str]:
    """Top-level and dotted names of the modules that a new interpreter holds after running `code`."""
    code += "\nimport sys; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


def test_import_brings_neither_torch_nor_lightning() -> None:
    assert not imported_by("import autobalance").intersection({"torch", "numpy", "rich", *LIGHTNING})


@pytest.mark.parametrize("name", modules())
def test_every_module_can_be_imported(name: str) -> None:
    importlib.import_module(name)


def test_only_the_strategy_imports_lightning() -> None:
    others = [name for name in modules() if not name.startswith("autobalance.strategy")]
    assert not imported_by("import " + ", ".join(others)).intersection(LIGHTNING)


def test_planning_imports_no_torch() -> None:
    code = (
        "import autobalance\n"
        "profile = autobalance.Profile.from_costs(static=[4, 4])\n"
        "plan = autobalance.plan(profile, [8, 8])\n"
        "autobalance.score(profile, plan.device_map, [8, 8]); str(plan)"
    )
    assert "torch" not in imported_by(code)


@pytest.mark.parametrize("name", autobalance.__all__)
def test_every_public_name_is_found(name: str) -> None:
    assert getattr(autobalance, name) is not None


def test_unknown_name_is_an_attribute_error_that_lists_the_names() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'balance'; it has BalanceMonitor, InfeasiblePlanError"):
        _ = autobalance.balance


def test_public_functions_are_not_hidden_by_modules_of_the_same_name() -> None:
    for name in modules():
        importlib.import_module(name)
    assert all(callable(getattr(autobalance, name)) for name in ("profile", "plan", "score", "simulate", "dispatch"))


def test_distribution_agrees_with_the_package() -> None:
    assert metadata.version("autobalance") == autobalance.__version__
    (script,) = metadata.entry_points(group="console_scripts", name="autobalance")
    assert script.value == "autobalance.cli:main"
    extras = metadata.metadata("autobalance").get_all("Provides-Extra")
    assert extras is not None
    assert {"solver", "plot", "test", "dev"} <= set(extras)
