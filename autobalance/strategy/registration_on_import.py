"""Register the strategy as soon as a Lightning package is imported, where that happens after `import autobalance`.

A finder in front of `sys.meta_path` finds the package as it would be found without it, and registers once the package
has run. It then takes itself away. Nothing here imports Lightning or torch, and nothing waits longer for an import.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

from autobalance.strategy.registration import ROOTS, register

if TYPE_CHECKING:  # `importlib.abc` would take longer to import than all of autobalance
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def register_now_or_on_import() -> None:
    """Register with every Lightning package, at once with those that this process has imported already.

    Example:
        >>> register_now_or_on_import()
        >>> from pytorch_lightning import Trainer  # doctest: +SKIP
        >>> Trainer(strategy="self_balance", devices=4)  # doctest: +SKIP
    """
    for root in ROOTS:
        if root in sys.modules:
            register(root)
        elif not any(isinstance(finder, RegistersOnImport) and finder.root == root for finder in sys.meta_path):
            sys.meta_path.insert(0, RegistersOnImport(root))


class RegistersOnImport:
    """Finds one package by the finders behind it in `sys.meta_path`, and registers when that package has run.

    Args:
        root: "pytorch_lightning" or "lightning.pytorch".
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The other finders' spec of the package, with a loader that registers; None of any other module."""
        if fullname != self.root:
            return None
        finders = sys.meta_path
        # Only those behind: one in front that asks all others, as hooks of other tools do, would ask this one again.
        for finder in finders[finders.index(self) + 1 :] if self in finders else ():
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = cast("Loader", _Loader(spec.loader, self))
                return spec
        return None

    def take_away(self) -> None:
        """Leave `sys.meta_path`."""
        # Another list, not this one shortened: a thread that walks it for an import of its own would skip a finder.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]


class _Loader:
    """The package's own loader in all but this: it is told when the package has run."""

    def __init__(self, own: Loader, finder: RegistersOnImport) -> None:
        self._own = own
        self._finder = finder

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._own  # the package itself and all after it see nothing of this
        self._own.exec_module(module)
        self._finder.take_away()
        register(self._finder.root)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
