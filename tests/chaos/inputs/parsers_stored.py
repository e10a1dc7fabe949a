"""What is stored and sent as checkpoints: records, indexes, files of tensors, exports, states, privacy, weights.

Seals and checksums are made to fit what was mutated, where it can still be read: a hostile file has them, too.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.chaos.inputs.parser import Form, Parser, command
from xffl.aggregation.algorithms.server_optimizer import read_saved_server, server_of
from xffl.aggregation.exports import RoundPlan, export_cell, is_written, load_global, read_global
from xffl.aggregation.offline import aggregate_exports
from xffl.aggregation.privacy import Accountant, Privacy
from xffl.checkpoint import find_latest_checkpoint, load_checkpoint, save_checkpoint
from xffl.checkpoint.manager import check_checkpoints
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import CheckpointError
from xffl.files import read_sealed, sealed_json, write_sealed
from xffl.json_text import parse_json
from xffl.naming import Writer
from xffl.reading import Fields
from xffl.training.mixins.state import COUNTERS, read_place_file

ALONE = DistributedState(rank=0, world_size=1)
POLICIES = {"*running*": "local", "*num_batches*": "local"}
RECORD, INDEX, DATA, OWN = "checkpoint.json", "cell_0/index.json", "cell_0/__0_0.distcp", "cell_0/own_0.pt"
Read = Callable[[bytes, Path], object]


class Kept:
    """A part, or own state, that holds plain values and a tensor."""

    def __init__(self) -> None:
        self.value: Any = {"a": [1, 2.5], "t": torch.arange(3.0), "pair": (1, None), 3: float("inf")}

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


def parts_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "scheduler": Kept()}


UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError)
"""What comes of a table that was mutated beyond what can be sealed: it is left as it is, for the reader to refuse"""


def seal(folder: Path) -> None:
    """Make checksums and seals of a checkpoint fit its files, as far as these can be read."""
    with suppress(*UNREADABLE):
        index = json.loads((folder / INDEX).read_bytes())
        for name in index["files"]:
            data = (folder / "cell_0" / name).read_bytes()
            index["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
        (folder / INDEX).write_text(json.dumps(index))
    with suppress(*UNREADABLE):
        record = json.loads((folder / RECORD).read_bytes())
        record["indexes"]["cell_0"] = hashlib.sha256((folder / INDEX).read_bytes()).hexdigest()
        (folder / RECORD).write_text(sealed_json(record))
    with suppress(*UNREADABLE):  # a record whose table of indexes is what was mutated
        record = json.loads((folder / RECORD).read_bytes())
        (folder / RECORD).write_text(sealed_json(record))


def put(content: bytes, pristine: Path, target: Path, name: str) -> None:
    """Make a copy of a checkpoint in which a file has another content, under a fitting seal."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(pristine, target)
    (target / name).write_bytes(content)
    seal(target)


# Checkpoints ----------------------------------------------------------------------------------------------------------


def checkpoint(folder: Path) -> Path:
    """Write a checkpoint as it is meant to be."""
    own = {"own": Kept()}
    save_checkpoint(folder / "good", parts_of(3), ALONE, own=own, values={"step": 3, "note": {"x": (1, 2)}})
    return folder / "good"


def of_checkpoint(name: str) -> tuple[Callable[[Path], list[bytes]], Read]:
    def examples(folder: Path) -> list[bytes]:
        return [(checkpoint(folder) / name).read_bytes()]

    def read(content: bytes, folder: Path) -> None:
        target = folder / "run" / "checkpoints" / "step_3"
        put(content, folder / "good", target, name)
        load_checkpoint(target, parts_of(4), ALONE, own={"own": Kept()})

    return examples, read


def examples_of_run(folder: Path) -> list[bytes]:
    shutil.copytree(checkpoint(folder), folder / "run" / "checkpoints" / "step_3")
    (folder / "run" / "checkpoints" / "latest").write_bytes(b"step_3\n")
    return [b"step_3\n"]


def read_latest(content: bytes, folder: Path) -> None:
    (folder / "run" / "checkpoints" / "latest").write_bytes(content)
    check_checkpoints(folder / "run")
    find_latest_checkpoint(folder / "run")


def consolidate(content: bytes, folder: Path) -> None:
    put(content, folder / "good", folder / "it", RECORD)
    shutil.rmtree(folder / "out", ignore_errors=True)
    command("consolidate", str(folder / "it"), str(folder / "out"))


# Rounds over files ----------------------------------------------------------------------------------------------------

SERVER = {"name": "fedadam", "lr": 0.03, "schedule": {"name": "StepLR", "step_size": 2}}


@cache
def made_exports() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of :func:`exports`, which is made once."""
    made = tempfile.TemporaryDirectory(prefix="xffl-exports-")
    make_exports(Path(made.name))
    return made


def exports(folder: Path) -> None:
    """Write the exports of two cells for rounds 0 to 2, their common start, and the server's state of round 1."""
    shutil.copytree(made_exports().name, folder, dirs_exist_ok=True)


def make_exports(folder: Path) -> None:
    plan = RoundPlan(None, {"combine": "mean", "server": SERVER})
    for number in range(3):
        for cell in range(2):
            export_cell(
                folder / f"e{number}_{cell}",
                parts_of(3 + cell + number)["model"],
                ALONE,
                cell=cell,
                cells=2,
                weight=2.0,
                round=number,
                plan=plan,
                policies=POLICIES,
            )
        given = {"state": folder / "state", "start": folder / "g0"} if number == 1 else {}
        if number < 2:
            aggregate_exports([folder / f"e{number}_0", folder / f"e{number}_1"], folder / f"g{number}", **given)


def of_export(name: str) -> tuple[Callable[[Path], list[bytes]], Read]:
    def examples(folder: Path) -> list[bytes]:
        exports(folder)
        return [(folder / "e2_0" / name).read_bytes()]

    def read(content: bytes, folder: Path) -> None:
        put(content, folder / "e2_0", folder / "it", name)
        put((folder / "e2_1" / RECORD).read_bytes(), folder / "e2_1", folder / "other", RECORD)
        with suppress(
            ValueError, TypeError, KeyError, RecursionError
        ):  # of the same hand: what all exports have in common
            told = json.loads((folder / "it" / RECORD).read_bytes())["values"]["export"]
            other = json.loads((folder / "other" / RECORD).read_bytes())
            own = {"cell": 1, "weight": 2.0, "steps": 1.0}
            (folder / "other" / RECORD).write_text(sealed_json({**other, "values": {"export": {**told, **own}}}))
        words = [str(folder / "it"), str(folder / "other"), "--out", str(folder / "out")]
        command("aggregate", *words, "--state", str(folder / "state"), "--dry-run")

    return examples, read


def of_global(name: str) -> tuple[Callable[[Path], list[bytes]], Read]:
    def examples(folder: Path) -> list[bytes]:
        exports(folder)
        return [(folder / "g1" / name).read_bytes()]

    def read(content: bytes, folder: Path) -> None:
        put(content, folder / "g1", folder / "it", name)
        is_written(folder / "it", "global", {"round": 1})
        read_global(folder / "it")
        load_global(folder / "it", parts_of(9)["model"], ALONE, policies=POLICIES)

    return examples, read


def of_state(name: str) -> tuple[Callable[[Path], list[bytes]], Read]:
    def examples(folder: Path) -> list[bytes]:
        exports(folder)
        shutil.copytree(folder / "state" / "round_1", folder / "good")
        return [(folder / "good" / name).read_bytes()]

    def read(content: bytes, folder: Path) -> None:
        put(content, folder / "good", folder / "state" / "round_1", name)
        shutil.rmtree(folder / "out", ignore_errors=True)
        shutil.rmtree(folder / "state" / "round_2", ignore_errors=True)
        words = [str(folder / "e2_0"), str(folder / "e2_1"), "--out", str(folder / "out")]
        command("aggregate", *words, "--state", str(folder / "state"))

    return examples, read


# Smaller ones ---------------------------------------------------------------------------------------------------------


def place_examples(folder: Path) -> list[bytes]:
    parts = {"trainer": dict.fromkeys(COUNTERS, 3), "scheduler": {"last_epoch": 3, "t": torch.arange(4.0)}}
    buffer = io.BytesIO()
    torch.save(parts, buffer)
    return [buffer.getvalue()]


def read_place(content: bytes, folder: Path) -> None:
    write_sealed(folder / "place.pt", content)
    try:
        read_place_file(folder / "place.pt")
    except ValueError as error:  # as the trainer does, which knows the remedy
        raise CheckpointError(str(error)) from error


def read_any_seal(content: bytes, folder: Path) -> None:
    (folder / "place.pt").write_bytes(content)
    try:
        read_sealed(folder / "place.pt")
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def privacy_examples(folder: Path) -> list[bytes]:
    return [json.dumps({"spent": [[1.0, "cell", 3, 7], [0.5, "sum", 4, 1]]}).encode()]


def privacy(content: bytes, folder: Path) -> None:
    try:
        state = json.loads(content)
    except (ValueError, RecursionError):
        return
    accountant = Accountant(Privacy(1.0, 1.0))
    accountant.load_state_dict(state)
    accountant.cover(state)
    if not all(
        noise < float("inf") and type(rounds) is int for noise, _, _, rounds in accountant.state_dict()["spent"]
    ):
        raise AssertionError(f"it was counted: {accountant.state_dict()}")


def saved_examples(folder: Path) -> list[bytes]:
    new = {"asked": {"class": "SGD"}, "elements": {"momentum": {}}, "step": 3}
    old = {"asked": {"class": "SGD"}, "elements": ["momentum_buffer"], "numbers": {"step": 3.0}, "options": {"lr": 0.1}}
    return [json.dumps(one).encode() for one in (new, {**old, "schedule": {"last_epoch": 3}})]


def saved_server(content: bytes, folder: Path) -> None:
    try:
        state = parse_json(content)
    except ValueError:
        return
    saved = read_saved_server(Fields(state, "a saved server", error=CheckpointError))
    server = server_of("SGD:momentum=0.9", writer=Writer.USER)
    assert server is not None
    server.check_saved(saved, "it", "begin anew")


def weight_examples(folder: Path) -> list[bytes]:
    from safetensors.torch import save_file

    tensors = {name: one.contiguous() for name, one in nn.Linear(4, 4).state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return [(folder / "model.safetensors").read_bytes()]


def weights(content: bytes, folder: Path) -> None:
    from xffl.training.models.weights import read_weights

    (folder / "model.safetensors").write_bytes(content)
    read_weights(nn.Linear(4, 4), folder)


def list_examples(folder: Path) -> list[bytes]:
    weight_examples(folder)
    names = dict.fromkeys(("weight", "bias"), "model.safetensors")
    return [json.dumps({"metadata": {"total_size": 80}, "weight_map": names}).encode()]


def weight_list(content: bytes, folder: Path) -> None:
    from xffl.training.models.weights import read_weights

    (folder / "model.safetensors.index.json").write_bytes(content)
    read_weights(nn.Linear(4, 4), folder)


def parsers(what: str, of: Callable[[str], tuple[Callable[[Path], list[bytes]], Read]], *names: str) -> list[Parser]:
    forms: dict[str, Form] = {RECORD: "json", INDEX: "json"}
    titles = {RECORD: "record", INDEX: "index", DATA: "tensors", OWN: "own state"}
    return [Parser(f"{what}: {titles[name]}", forms.get(name, "bytes"), *of(name)) for name in names]


PARSERS = (
    *parsers("checkpoint", of_checkpoint, RECORD, INDEX, DATA, OWN),
    *parsers("export", of_export, RECORD, INDEX, DATA),
    *parsers("global model", of_global, RECORD, INDEX, DATA),
    *parsers("server state", of_state, RECORD, INDEX, DATA),
    Parser("checkpoint: latest", "text", examples_of_run, read_latest),
    Parser("checkpoint: consolidate", "json", of_checkpoint(RECORD)[0], consolidate),
    Parser("elastic: place.pt", "bytes", place_examples, read_place),
    Parser("elastic: sealed file", "bytes", place_examples, read_any_seal),
    Parser("server state: of a network", "json", saved_examples, saved_server),
    Parser("privacy: accountant", "json", privacy_examples, privacy),
    Parser("weights: safetensors", "bytes", weight_examples, weights),
    Parser("weights: list of files", "json", list_examples, weight_list),
)
