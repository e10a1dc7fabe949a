"""Sphinx settings. `make docs` builds with -W: a warning is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

project = "xffl"
author = "the xffl authors"
copyright = author  # noqa: A001
found = re.search(r'^__version__ = "(.+)"$', (ROOT / "xffl" / "__init__.py").read_text(), re.MULTILINE)
assert found is not None, "xffl/__init__.py holds the version"
release = version = found.group(1)

extensions = ["autoapi.extension", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
nitpicky = False
html_theme = "furo"
html_title = f"xffl {release}"
html_static_path = ["_static"]
html_theme_options = {"navigation_with_keys": True}

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

autoapi_dirs = [str(ROOT / "xffl")]
autoapi_root = "reference/api"
autoapi_ignore = ["*/__main__.py"]
autoapi_add_toctree_entry = False
autoapi_keep_files = False
autoapi_member_order = "bysource"
autoapi_python_class_content = "class"
autoapi_options = [
    "members",
    "undoc-members",
    "inherited-members",
    "show-inheritance",
    "show-module-summary",
    "special-members",
]

CONTRACT = "xffl.distributed.distributed_state"
"""The module whose private, special and inherited members are shown: they are part of its contract."""


def skip_member(app: object, what: str, name: str, obj: Any, skip: bool, options: object) -> bool | None:
    """Show private, special and inherited members of that module only."""
    if what in ("package", "module"):
        return None
    own = name.startswith(f"{CONTRACT}.")
    if getattr(obj, "inherited", False) and not own:
        return True
    if name.rpartition(".")[2].startswith("_"):
        return not own or not obj.docstring
    return None


def open_own_branch(app: object, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Unfold the side bar only where the page is: with all modules on each page, building took thrice the time."""
    if whole := context.get("toctree"):
        context["toctree"] = lambda **options: whole(**{**options, "collapse": True})


def setup(app: Any) -> None:
    app.connect("autoapi-skip-member", skip_member)
    app.connect("html-page-context", open_own_branch, priority=400)  # before the theme, which asks for all of it
