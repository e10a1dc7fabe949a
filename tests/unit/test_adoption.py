"""A state for a process group that somebody else is to have made."""

from __future__ import annotations

import pytest

import xffl


@pytest.mark.parametrize("prefix", ["OMPI_COMM_WORLD", "MV2_COMM_WORLD"])
def test_one_process_of_several_is_not_taken_for_one_that_is_alone(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "SIZE": "3", "LOCAL_RANK": "1", "LOCAL_SIZE": "3"}.items():
        monkeypatch.setenv(f"{prefix}_{name}", value)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(xffl.StateError, match="this process is one of 3, and no process group is initialized"):
        xffl.adopt()
