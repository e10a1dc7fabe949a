"""What cells of elastic runs and replica groups tell each other."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.chaos.inputs.parser import Parser
from tests.journal_records import BASE, RECORDS, ROUND, RUN
from xffl.aggregation.federations.catch_up_state import read_catch_up_state, write_catch_up_state
from xffl.distributed.replicas.plain_values import to_plain
from xffl.distributed.replicas.replica_transport import NONCE_BYTES, ShardTransport
from xffl.elastic.lighthouse_client import NotOwnRecord, Register
from xffl.elastic.roster import CellRecord, form_epoch
from xffl.errors import ConfigError
from xffl.journal import records as journal
from xffl.journal.records import ModelId, next_lineage, record_text
from xffl.journal.who_continues import History, Member

TOKEN = b"the token of all of them"
OWN = CellRecord(
    0, 3, "0.a", start="1" * 32, replica_size=2, address="127.0.0.1:1", held=ModelId("2" * 32, 4, "3" * 32), round=4
)


def records(folder: Path) -> list[bytes]:
    """Return records of another cell."""
    del folder
    first = CellRecord(
        cell=1,
        cells=3,
        life="1.b",
        ranks=4,
        replica_size=2,
        address="127.0.0.1:2",
        start="4" * 32,
        since=3,
        held=OWN.held,
        seen=5,
        round=4,
        reach_s=2.5,
        gone=(2,),
        group="4.17/2",
        serial=7,
        told='{"metrics": {"loss": 0.5}, "ranks": 4}',
        total_weight=12.5,
    )
    return [json.dumps(one.to_plain()).encode() for one in (first, replace(first, held=None, told=""))]


def read_record(content: bytes, folder: Path) -> object:
    """Read a record as the lighthouse gives it, signed by somebody who knows the token, and meet its cell."""
    del folder
    try:
        plain = json.loads(content)
    except (ValueError, RecursionError) as error:  # torchft has read it, and raises to who asks for a meeting
        raise ConfigError(str(error)) from error
    register = Register(TOKEN)
    try:
        signed = register.sign(plain) if isinstance(plain, dict) else plain
        record = register.read("1.b", signed)
    except NotOwnRecord as error:
        raise ConfigError(str(error)) from error
    except (ValueError, RecursionError) as error:  # nobody can sign it
        raise ConfigError(str(error)) from error
    return None if record is None else form_epoch([OWN, record], 19, History()).digest


def signed_records(folder: Path) -> list[bytes]:
    """Return signed records."""
    return [json.dumps(Register(TOKEN).sign(json.loads(one))).encode() for one in records(folder)]


def read_stranger(content: bytes, folder: Path) -> object:
    """Read what somebody tells who does not know the token."""
    del folder
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(error)) from error
    try:
        return Register(TOKEN).read("1.b", data)
    except NotOwnRecord as error:
        raise ConfigError(str(error)) from error


def journal_records(folder: Path) -> list[bytes]:
    """Return a record of each kind, and the first of a run."""
    del folder
    first = replace(ROUND, number=0, id=RUN, round=1, base=None, lineage=next_lineage(None, RUN))
    return [record_text(record).encode() for record in (*RECORDS, first)]


def read_journal_record(content: bytes, folder: Path) -> object:
    """Read a record, write it again, and begin a journal with it if it is a first one."""
    del folder
    record = journal.read_record(content, "a file")
    text = record_text(record)
    assert journal.read_record(text, "a file") == record
    history = History()
    if record.number == 0:
        history.add([record])
    return history.choose_base([Member(0, RUN, -1, BASE)])


OPTIMIZER = {"step": 3, "elements": {"momentum": {}}, "asked": {"class": "SGD"}}
AGREED: dict[str, Any] = {"model": {}, "optimizers": {0: OPTIMIZER}}


def hand_overs(folder: Path) -> list[bytes]:
    """Return what a cell hands over, as the bytes that its text stands for."""
    del folder
    privacy = {"spent": [[0.5, "cell", 3, 2]]}
    return [base64.b64decode(write_catch_up_state(AGREED, one)) for one in (privacy, None)]


def read_handed_over(content: bytes, folder: Path) -> object:
    del folder
    return read_catch_up_state(base64.b64encode(content).decode(), 1)


def plain_hand_overs(folder: Path) -> list[bytes]:
    """Return what a cell hands over as JSON, to change its values one by one."""
    del folder
    return [
        json.dumps({"agreed": {"optimizers": {"0": OPTIMIZER}}, "privacy": {"spent": [[0.5, "cell", 3, 2]]}}).encode()
    ]


def read_plain_hand_over(content: bytes, folder: Path) -> object:
    del folder
    try:
        plain = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(error)) from error
    if isinstance(plain, dict) and isinstance(agreed := plain.get("agreed"), dict):
        parts = agreed.get("optimizers")
        if isinstance(parts, dict):
            agreed["optimizers"] = {int(part) if part == "0" else part: one for part, one in parts.items()}
    file = io.BytesIO()
    try:
        torch.save(plain, file)
    except RecursionError as error:
        raise ConfigError(str(error)) from error
    return read_catch_up_state(base64.b64encode(file.getvalue()).decode(), 1)


STATE = {"model": {"w": torch.arange(6.0).view(2, 3)}, "loader": {"step": 3, "seen": [1, 2], "rate": float("inf")}}


def states(folder: Path) -> list[bytes]:
    """Return texts that say what comes of a replica group's state."""
    del folder
    tensors: dict[str, torch.Tensor] = {}
    plain = to_plain({"user": STATE, "torchft": {"step": 7, "batches_committed": 14}}, "state", tensors)
    table = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
    return [json.dumps({"step": 7, "plain": plain, "tensors": table}).encode()]


def read_state(content: bytes, folder: Path) -> object:
    """Fetch a state from a giver that knows the token."""
    del folder
    transport = ShardTransport("127.0.0.1", TOKEN, lambda: STATE)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = "{}:{}".format(*listener.getsockname())

        def give() -> None:
            link, _ = listener.accept()
            with link, suppress(OSError):
                link.sendall(bytes(NONCE_BYTES))
                got = link.recv(4096)
                asked = place.encode() + got[NONCE_BYTES : NONCE_BYTES + 8]
                proof = transport._proof(b"giver", bytes(NONCE_BYTES), got[:NONCE_BYTES], asked)
                link.sendall(proof + struct.pack("!Q", len(content)) + content + bytes(24) + b"\1")

        thread = threading.Thread(target=give)
        thread.start()
        try:
            return transport.recv_checkpoint(0, place, 7, timedelta(seconds=5))
        finally:
            thread.join()
            transport.shutdown()


PARSERS = (
    Parser("cell records", "json", records, read_record),
    Parser("records of strangers", "json", signed_records, read_stranger),
    Parser("records of a journal", "json", journal_records, read_journal_record),
    Parser("hand-overs", "bytes", hand_overs, read_handed_over),
    Parser("hand-overs' values", "json", plain_hand_overs, read_plain_hand_over),
    Parser("states of replica groups", "json", states, read_state),
)
