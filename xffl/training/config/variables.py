"""Environment variables that set values of a configuration: those of xffl's name that it has no other use for."""

from __future__ import annotations

import os
from collections.abc import Mapping

from xffl.cluster.network import LOCAL_VARIABLE
from xffl.cluster.recognition.foreign_sizes import FOREIGN_SIZES

__all__ = ["requested_settings"]

_OWN = (
    *("XFFL_BIND", "XFFL_BLAUNCH", "XFFL_CELL", "XFFL_CHECK_WORLD", "XFFL_CONTROL_IFNAME", "XFFL_EARLIER_JOBS"),
    *("XFFL_EXPORT", "XFFL_FEDERATED", "XFFL_FLUX_RUN"),
    *(FOREIGN_SIZES, "XFFL_FROM", "XFFL_HOST"),
    *("XFFL_HSDP", "XFFL_IFNAME", "XFFL_ISLAND", "XFFL_JOURNAL", "XFFL_JOURNAL_FOLDER"),
    *("XFFL_LAUNCHED_CELLS", "XFFL_LIGHTHOUSE"),
    *(LOCAL_VARIABLE, "XFFL_MEETING_TIMEOUT", "XFFL_PYTHON"),
    *("XFFL_REQUIRE_CELLS", "XFFL_RESOLVED", "XFFL_RESTARTS", "XFFL_SCHED", "XFFL_SRUN", "XFFL_SSH", "XFFL_TEMPLATES"),
    *("XFFL_TOKEN", "XFFL_TOKEN_FILE"),
)
"""Variables that this package knows; all other ``XFFL_`` ones may be for configurations."""


def requested_settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that may set values of a configuration, such as ``XFFL_TRAINING__EPOCHS``."""
    environ = os.environ if environ is None else environ
    return {name: text for name, text in environ.items() if name.startswith("XFFL_") and name not in _OWN}
