"""Placement: blocks onto devices, the hooks that move their inputs, and the glue between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autobalance.placement.dispatch import dispatch as dispatch
    from autobalance.placement.install import Installed as Installed
    from autobalance.placement.install import install as install
    from autobalance.placement.place import place as place

_EXPORTS = {
    "Installed": "autobalance.placement.install",
    "dispatch": "autobalance.placement.dispatch",
    "install": "autobalance.placement.install",
    "place": "autobalance.placement.place",
}
__all__ = ["Installed", "dispatch", "install", "place"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        from importlib import import_module

        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
