"""Names of a package that are imported when they are first used, so that what needs no torch does without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["lazy_names"]


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package, for the modules of its names."""

    def getattr_of_package(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    def dir_of_package() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return getattr_of_package, dir_of_package
