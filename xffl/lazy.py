"""Names of a package that are imported when they are first used, so that what needs no torch does without it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(package: str, **more: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package, for the names that it imports ``if TYPE_CHECKING``.

    Its source says where they live, to type checkers and at run time alike; ``more`` are the modules of other names.
    Modules of the package are imported when they are first used, too: ``xffl.aggregation.ExpertTokens`` must not depend
    on whether something else has imported ``xffl.aggregation`` before.
    """
    homes = dict(more)
    loader: Any = sys.modules[package].__loader__
    for block in ast.parse(loader.get_source(package)).body:
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            imports = (node for node in block.body if isinstance(node, ast.ImportFrom))
            homes |= {alias.name: str(node.module) for node in imports for alias in node.names}

    def getattr_of_package(name: str) -> object:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        if name.isidentifier() and not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def dir_of_package() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return getattr_of_package, dir_of_package
