"""What a late cell is handed by another one: values that go with its own, or a named error; nothing runs."""

from __future__ import annotations

import base64
import io
import os
import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from xffl.aggregation.federations.catch_up_state import LONGEST, read_catch_up_state, write_catch_up_state
from xffl.errors import RoundError

OWN: dict[str, Any] = {
    "optimizers": {
        0: {
            "step": 3,
            "elements": {"momentum": {}},
            "asked": {"class": "SGD"},
        }
    }
}


def changed(*path: Any, value: Any) -> str:
    """Return a text in which one value of the only optimizer is another one."""
    agreed = deepcopy(OWN)
    place = agreed["optimizers"][0]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return write_catch_up_state(agreed, None)


def test_what_was_written_is_read() -> None:
    privacy = {"spent": [[0.5, "cell", 3, 2]]}
    told = read_catch_up_state(write_catch_up_state({"model": {}, **OWN}, privacy), 1)
    assert told.optimizers == OWN["optimizers"] and told.privacy == privacy
    assert read_catch_up_state(write_catch_up_state(OWN, None), 1).privacy is None


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("elements", "x"), 3, "elements.x of fragment 0"),
        (("elements",), {str(n): {} for n in range(1000)}, "elements of fragment 0 .* at most 64 names"),
        (("step",), torch.zeros(10**6), "step of fragment 0 .* must be .* integer"),
        (("step",), -1, "step of fragment 0 .* must be .* integer"),
        (("asked",), None, "asked of fragment 0"),
    ],
)
def test_a_value_that_does_not_go_with_the_own_ones_is_named(path: tuple[Any, ...], value: Any, told: str) -> None:
    with pytest.raises(RoundError, match=f"{told}"):
        read_catch_up_state(changed(*path, value=value), 1)


def test_a_text_that_is_none_runs_nothing(tmp_path: Path) -> None:
    touched = tmp_path / "touched"

    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {touched}",)

    file = io.BytesIO()
    torch.save({"agreed": Hostile()}, file)
    for data in (pickle.dumps(Hostile()), file.getvalue(), b"", b"PK\3\4"):
        with pytest.raises(RoundError, match="^what cell 1 hands over cannot be read"):
            read_catch_up_state(base64.b64encode(data).decode(), 1)
    assert not touched.exists()
    for text in (None, 3, "x" * (LONGEST + 1)):
        with pytest.raises(RoundError, match="^what cell 1 hands over is .*, and no text of at most"):
            read_catch_up_state(text, 1)
