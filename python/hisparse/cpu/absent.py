"""Stand-ins for packages that SGLang imports and never calls on this path.

Importing works, whatever the name; calling raises NotImplementedError with the full name. The packages in ``shims`` are
made of these. They live on the import path of SGLang's processes only (see ``environment``).
"""

import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from typing import Any, NoReturn


class Absent:
    """A name of an absent package: has any attribute, may serve as an annotation or base class, cannot be called."""

    def __init__(self, path: str):
        self._path = path

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._path}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{self._path} was called; it is not available when SGLang runs without a GPU")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<absent {self._path}>"


def stand_in(package: str) -> Callable[[str], Absent]:
    """Make ``package`` answer for every attribute and every submodule it does not define itself.

    To be called once in the package's ``__init__``: ``__getattr__ = stand_in(__name__)``.
    """
    if not any(isinstance(finder, _Submodules) and finder.package == package for finder in sys.meta_path):
        sys.meta_path.append(_Submodules(package))  # last: real submodules of the package win
    return absent_names(package)


def absent_names(module: str) -> Callable[[str], Absent]:
    """A module-level ``__getattr__`` for ``module``."""

    def __getattr__(name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{module}.{name}")

    return __getattr__


class _Submodules(MetaPathFinder, Loader):
    """Finds any submodule of one package; each is empty but for its ``__getattr__``."""

    def __init__(self, package: str):
        self.package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self.package + "."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__getattr__"] = absent_names(module.__name__)
