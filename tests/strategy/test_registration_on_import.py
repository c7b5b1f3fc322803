"""A package that is imported later is found as ever, runs once, is registered once, and nothing of the wait is left."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from autobalance.strategy import registration_on_import
from autobalance.strategy.registration_on_import import RegistersOnImport, register_now_or_on_import

NAME = "awaited_package"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What was registered; a small package stands for Lightning's, and importing as it was comes back afterwards."""
    calls: list[str] = []
    monkeypatch.setattr(registration_on_import, "ROOTS", (NAME,))
    monkeypatch.setattr(registration_on_import, "register", calls.append)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    yield calls
    for name in [name for name in sys.modules if name.startswith(NAME)]:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., None]:
    def put(init: str = "runs = globals().get('runs', 0) + 1", **modules: str) -> None:
        folder = tmp_path / NAME
        folder.mkdir(exist_ok=True)
        for name, text in {"__init__": init, **modules}.items():
            (folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    return put


def waiting() -> list[Any]:
    return [finder for finder in sys.meta_path if isinstance(finder, RegistersOnImport) and finder.root == NAME]


def test_it_registers_after_the_package_has_run_and_leaves(write: Callable[..., None], registered: list[str]) -> None:
    write("from awaited_package import part", part="import sys; done = hasattr(sys.modules['awaited_package'], 'part')")
    before = list(sys.meta_path)
    register_now_or_on_import()
    register_now_or_on_import()
    assert len(waiting()) == 1
    assert registered == []
    part = importlib.import_module(f"{NAME}.part")
    assert registered == [NAME]
    assert sys.meta_path == before
    package = sys.modules[NAME]
    assert part.__loader__ is not package.__loader__
    assert type(package.__loader__) is type(part.__loader__)
    assert package.__spec__ is not None
    assert package.__spec__.loader is package.__loader__


def test_what_is_there_already_is_registered_at_once(write: Callable[..., None], registered: list[str]) -> None:
    write()
    importlib.import_module(NAME)
    register_now_or_on_import()
    assert registered == [NAME]
    assert not waiting()


def test_looking_for_the_package_without_importing_it_changes_nothing(
    write: Callable[..., None], registered: list[str]
) -> None:
    register_now_or_on_import()
    assert importlib.util.find_spec(NAME) is None  # not installed yet
    write()
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    assert spec.loader.get_source(NAME) == "runs = globals().get('runs', 0) + 1"  # type: ignore[attr-defined]
    assert registered == []
    assert importlib.import_module(NAME).runs == 1
    assert registered == [NAME]


def test_a_package_that_fails_is_awaited_again(write: Callable[..., None], registered: list[str]) -> None:
    write("raise ImportError('no such library')")
    register_now_or_on_import()
    with pytest.raises(ImportError, match="no such library"):
        importlib.import_module(NAME)
    assert registered == []
    assert len(waiting()) == 1
    write("runs = 'at last, and longer than what failed'")
    assert importlib.import_module(NAME).runs.startswith("at last")
    assert registered == [NAME]


def test_a_package_that_is_run_again_is_left_alone(write: Callable[..., None], registered: list[str]) -> None:
    write()
    register_now_or_on_import()
    package = importlib.import_module(NAME)
    assert importlib.reload(package).runs == 2
    assert registered == [NAME]
    assert not waiting()


def test_a_folder_without_code_is_no_package_to_register(
    tmp_path: Path, write: Callable[..., None], registered: list[str]
) -> None:
    (tmp_path / NAME).mkdir()
    register_now_or_on_import()
    module = importlib.import_module(NAME)
    assert getattr(module, "__file__", None) is None
    assert registered == []


def test_threads_that_import_at_once_see_a_registered_package(
    write: Callable[..., None], registered: list[str], tmp_path: Path
) -> None:
    write("import time; time.sleep(0.05)")
    for index in range(8):
        (tmp_path / f"{NAME}_beside_{index}.py").write_text("")
    register_now_or_on_import()
    at_once, seen = threading.Barrier(16), []

    def imports(index: int) -> None:
        at_once.wait()
        name = NAME if index % 2 else f"{NAME}_beside_{index // 2}"
        importlib.import_module(name)
        seen.append(name != NAME or registered == [NAME])

    threads = [threading.Thread(target=imports, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 16
    assert registered == [NAME]
    assert not waiting()


@pytest.mark.parametrize("position", [0, 1])
def test_hooks_of_other_tools_work_beside_it(write: Callable[..., None], registered: list[str], position: int) -> None:
    """Tools that trace calls ask all finders for what they themselves are asked for."""

    class Traces:
        asked = False

        def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
            if name != NAME or self.asked:
                return None
            self.asked = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.asked = False

    write()
    register_now_or_on_import()
    sys.meta_path.insert(position, Traces())
    assert importlib.import_module(NAME).runs == 1
    assert set(registered) == {NAME}
    assert not waiting()
