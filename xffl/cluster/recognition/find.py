"""Which launcher started this process: the row of the table that matches its variables."""

from __future__ import annotations

from xffl.cluster.recognition.launcher import Environ, Launcher
from xffl.cluster.recognition.launchers import LAUNCHERS
from xffl.cluster.recognition.refusals import refuse_contradiction, refuse_other_launchers

__all__ = ["find_launcher", "launcher_of"]


def find_launcher(environ: Environ) -> Launcher | None:
    """Return the row of the launcher that started this process and tells its place; ``None`` where none does."""
    return next((row for row in LAUNCHERS if row.matches(environ)), None)


def launcher_of(environ: Environ) -> Launcher | None:
    """Return what :func:`find_launcher` does; raise where launchers contradict each other, or one tells too little."""
    row = find_launcher(environ)
    if row is None:
        refuse_other_launchers(environ)
    elif row.name == "variables":
        refuse_contradiction(row, environ)
    return row
