"""Imports when they are needed: optional packages, and the names of a package that needs no torch until then.

xffl comes from its repository and is in no package index, so a hint names the packages that an extra stands for.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from xffl.errors import ConfigError

__all__ = ["install_command", "lazy_names", "optional_import"]


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra's packages.

    :param extra: The extra, as ``setup.cfg`` names it.
    :return: ``pip install`` with the extra's requirements; where xffl is used from a checkout and its metadata are not
        installed, or older than the extra, with the checkout.
    """
    # Imported here: it takes as long as the rest of the command line, which seldom has to hint at anything.
    from importlib import metadata

    try:
        lines = metadata.requires("xffl") or []
    except metadata.PackageNotFoundError:
        lines = []
    # "name>=1; extra == 'x'" or "name>=1; MARKER and extra == 'x'": pip itself evaluates what is left of a marker.
    pattern = re.compile(rf"""(.+?) *; *(?:\(?(.+?)\)? and )?extra *== *["']{re.escape(extra)}["']""")
    requirements = [
        f"{match[1]}; {match[2]}" if match[2] else match[1] for line in lines if (match := pattern.fullmatch(line))
    ]
    packages = requirements or ["-e", f"{Path(__file__).parents[1]}[{extra}]"]
    return shlex.join(["pip", "install", *packages])


@contextmanager
def optional_import(extra: str, need: str) -> Iterator[None]:
    """Turn an import that fails in this block into an error that says how to install an extra's packages.

    :param extra: The extra that brings what the block imports.
    :param need: What needs which package: ``figures need matplotlib``.
    :yield: Nothing.
    :raises ConfigError: if the block raises an ImportError, also of a package that is there and broken.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{need}, which cannot be imported ({error}); run: {install_command(extra)}") from error


def lazy_names(package: str, **more: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package, for the names that it imports ``if TYPE_CHECKING``.

    Its source says where they live, to type checkers and at run time alike; ``more`` are the modules of other names.
    """
    homes = dict(more)
    loader: Any = sys.modules[package].__loader__
    for block in ast.parse(loader.get_source(package)).body:
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            imports = (node for node in block.body if isinstance(node, ast.ImportFrom))
            homes |= {alias.name: str(node.module) for node in imports for alias in node.names}

    def getattr_of_package(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    def dir_of_package() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return getattr_of_package, dir_of_package
