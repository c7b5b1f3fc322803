"""What every test starts from: a fixed seed, an empty folder to write in, and an environment put back afterwards."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for each other


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Leave what imports brought out of garbage collections, which tests of memory ask for often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Put environment variables back: Lightning sets some, and a test may."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder, so that logs and checkpoints of a Trainer are not left in the repository."""
    monkeypatch.chdir(tmp_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
