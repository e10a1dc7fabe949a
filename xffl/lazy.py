"""Names of a package that are imported when they are first used, so that what needs no torch does without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["lazy_names"]


def lazy_names(
    package: str, homes: Mapping[str, str] | None = None, **more: str
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package, for names and the modules that have them.

    Without ``homes`` they are read from the package's source: what it imports under ``if TYPE_CHECKING:``.
    """
    known = {**(_imports_for_readers(package) if homes is None else homes), **more}

    def getattr_of_package(name: str) -> object:
        if name not in known:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(known[name]), name)

    def dir_of_package() -> list[str]:
        return sorted({*vars(sys.modules[package]), *known})

    return getattr_of_package, dir_of_package


def _imports_for_readers(package: str) -> dict[str, str]:
    import ast  # here, since the command line begins without it
    import pkgutil

    tree = ast.parse(pkgutil.get_data(package, "__init__.py") or b"")
    blocks = [node.body for node in tree.body if isinstance(node, ast.If)]
    imports = [node for body in blocks for node in body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
