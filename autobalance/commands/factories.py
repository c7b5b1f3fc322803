"""A function named in words: found, imported, and called without memory for what it makes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autobalance.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def find_function(place: str) -> Any:
    """The function at FILE.py:FUNCTION or MODULE:FUNCTION.

    Example:
        >>> find_function("net.py:make")    # doctest: +SKIP

    Args:
        place: where it is.

    Raises:
        ValueError: the text names no function, or there is none.
        ImportError: the module cannot be imported.
    """
    where, colon, name = place.rpartition(":")
    if not colon:
        raise ValueError(f"{place!r} names no function: write FILE.py:FUNCTION or MODULE:FUNCTION")
    if where.endswith(".py"):
        module = run_file(Path(where))
    else:
        if "" not in sys.path:
            sys.path.insert(0, "")  # as `python -m` has it, so that a module in this folder is found
        module = importlib.import_module(where)
    return named(module, name)


def named(module: Any, name: str) -> Any:
    """Something of a module that can be called.

    Example:
        >>> named(torch.optim, "AdamW")     # doctest: +SKIP

    Args:
        module: the module.
        name: of a function or class.

    Raises:
        ValueError: there is none of this name.
    """
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{module.__name__} has no {name!r} that can be called")
    return getattr(module, name)


def run_file(path: Path) -> Any:
    """The module that a file makes when it runs.

    Example:
        >>> run_file(Path("net.py")).make()     # doctest: +SKIP

    Args:
        path: the file.

    Raises:
        ValueError: there is no such file.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # pickle and dataclasses look a module up by its name
    spec.loader.exec_module(module)
    return module


def call_factory(place: str, *, on_meta: bool) -> tuple[nn.Module, Any, list[str]]:
    """The model, the batch if there is one, and what there is to say about how they were made.

    Example:
        >>> model, batch, notes = call_factory("net.py:make", on_meta=True)     # doctest: +SKIP

    Args:
        place: FILE.py:FUNCTION or MODULE:FUNCTION; the function takes nothing and returns a model, or (model, batch).
        on_meta: call it under `torch.device("meta")`, so that the weights take no memory.

    Returns:
        The model; the batch, None if the function returns none; notes.

    Raises:
        TypeError: the function returns something else.
        ValueError: the function raises, or as for `find_function`.
    """
    import torch

    from autobalance.commands.host_batch import batch_on_host

    make = find_function(place)
    notes: list[str] = []
    try:
        with torch.device("meta" if on_meta else "cpu"):
            made = _built(make) if on_meta else call_named(place, lambda: _built(make))
    except Exception as error:
        if not on_meta:
            raise
        reason = str(error).strip().split("\n")[0]
        notes.append(
            f'{place} does not run under torch.device("meta") ({type(error).__name__}: {reason}), so it was called '
            f"again with the model in host memory"
        )
        made = call_named(place, lambda: _built(make))
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{place} returned a {type(made).__name__}; it must return a torch.nn.Module, or the pair (model, batch)"
        )
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "meta")
    if on_meta and held and not notes:
        notes.append(f"{place} says itself where tensors are: {format_size(held)} of the model took memory")
    return model, batch_on_host(batch), notes


def call_named(place: str, function: Callable[[], Any]) -> Any:
    """What a user's function returns; what it raises is told with its name and the line.

    Example:
        >>> call_named("net.py:batch", find_function("net.py:batch"))       # doctest: +SKIP

    Args:
        place: how the function was named.
        function: itself.

    Raises:
        ValueError: it raises.
    """
    try:
        return function()
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        # The innermost line of the user's own, where libraries that it calls are installed.
        own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
        where = f" at {own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else ""
        raise ValueError(f"{place} raised {type(error).__name__}{where}: {error}") from error


def _built(make: Any) -> Any:
    """What a factory makes; a LightningModule may build its layers in `configure_model`, as the Trainer calls it."""
    made = make()
    configure = getattr(made[0] if isinstance(made, tuple) and made else made, "configure_model", None)
    if callable(configure):
        configure()
    return made
