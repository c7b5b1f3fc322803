from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autobalance.commands.factories import call_factory

pytestmark = pytest.mark.usefixtures("factory")


def devices_of(model: nn.Module) -> set[str]:
    return {parameter.device.type for parameter in model.parameters()}


def test_a_factory_is_called_without_memory_for_the_model() -> None:
    model, batch, notes = call_factory("factory.py:make", on_meta=True)
    assert devices_of(model) == {"meta"}
    assert torch.equal(batch, torch.zeros(4, 64))
    assert notes == []
    model, batch, _ = call_factory("factory.py:forgets_the_batch", on_meta=False)
    assert devices_of(model) == {"cpu"}
    assert batch is None


def test_it_is_said_where_the_model_takes_memory() -> None:
    model, _, notes = call_factory("factory.py:needs_numbers", on_meta=True)
    assert devices_of(model) == {"cpu"}
    assert 'factory.py:needs_numbers does not run under torch.device("meta") (RuntimeError: ' in notes[0]
    assert notes[0].endswith("so it was called again with the model in host memory")
    model, _, notes = call_factory("factory.py:elsewhere", on_meta=True)
    assert notes == ["factory.py:elsewhere says itself where tensors are: 2.03 KiB of the model took memory"]


def test_an_error_of_the_factory_itself_is_raised() -> None:
    with pytest.raises(TypeError, match=r"it must return a torch\.nn\.Module, or the pair"):
        call_factory("factory.py:batch", on_meta=True)


def test_what_a_factory_raises_is_told_with_its_name_and_line() -> None:
    Path("broken.py").write_text("def inner():\n    return {}['missing']\n\ndef make():\n    return inner()\n")
    for on_meta in (True, False):
        with pytest.raises(
            ValueError, match=r"^broken\.py:make raised KeyError at .*broken\.py:2, in inner: 'missing'$"
        ):
            call_factory("broken.py:make", on_meta=on_meta)
