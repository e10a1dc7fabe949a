"""A plugin of pytest that pretends packages are not installed: ``HIDDEN=torchao,datasets pytest -p tests.hidden``."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

HIDDEN = frozenset(os.environ.get("HIDDEN", "").split(","))


class Hider(importlib.machinery.PathFinder):
    """Finds what is installed, but for what is hidden."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return None if fullname.partition(".")[0] in HIDDEN else super().find_spec(fullname, path, target)


sys.meta_path[:] = [Hider if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
