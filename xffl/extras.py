"""Optional packages: imported when they are needed, with a hint where they are missing.

xffl comes from its repository and is in no package index, so a hint names the packages that an extra stands for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xffl.errors import ConfigError

__all__ = ["install_command", "optional_import"]


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
