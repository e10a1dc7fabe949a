"""What is stored is checked before memory is taken: tables of tensors, archives, records, states."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import pickle
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from xffl.aggregation.algorithms.server import load_options, load_schedule
from xffl.aggregation.privacy import Accountant, Privacy
from xffl.checkpoint import load_checkpoint, save_checkpoint
from xffl.checkpoint.tables import read_files, read_tensors
from xffl.checkpoint.torch_files import load_archive
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.sharding import dtype_of, from_plain
from xffl.errors import CheckpointError
from xffl.files import sealed_json

ALONE = DistributedState(rank=0, world_size=1)
FILES = {"a": (4096, "0" * 64)}


def table(shape: list[Any], *chunks: Any, dtype: Any = "float32") -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "chunks": list(chunks)}}


def chunk(offsets: Any, sizes: Any, file: Any = "a", offset: Any = 0, length: Any = 1024) -> list[Any]:
    return [offsets, sizes, file, offset, length]


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (table([4], chunk([-2], [4])), "offsets of 'x' must be integers from 0"),
        (table([4], chunk([2], [4])), "leaves the shape"),
        (table([4], chunk([0], [2])), "have 2 elements"),
        (table([4], chunk([0], [2]), chunk([1], [2])), "overlap"),
        (table([4], chunk([0], [3]), chunk([0], [1])), "overlap"),
        (table([2, 3], chunk([0, 0], [1, 3]), chunk([0, 1], [2, 1]), chunk([1, 2], [1, 1])), "overlap"),
        (table([10**12], chunk([0], [10**12])), "1000000000000 elements in 1024 bytes"),
        (table([2**40, 2**40], chunk([0, 0], [2**40, 2**40])), "elements are read at most"),
        (table([4], chunk([0], [4], length=-1)), "places of 'x' must be integers"),
        (table([4], chunk([0], [4], offset=4000)), "which has 4096 bytes"),
        (table([4], chunk([0], [4], file="../a")), "no file that it knows"),
        (table([4], chunk([0], [True])), "got True"),
        (table([4], chunk([0], [4]), dtype="onnx"), "no data type of torch"),
        (table([1] * 65, chunk([0] * 65, [1] * 65)), "a list of 64 integers at most"),
        (table([4], chunk([0, 0], [4, 1])), "for the shape"),
        (table([4], [0]), "must have offsets"),
        ({"x": 3}, "must have a dtype"),
        ([], "must be a mapping"),
    ],
)
def test_a_table_that_lies_is_refused(tensors: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_tensors(tensors, FILES)


def test_tables_as_ranks_write_them_are_read() -> None:
    rows = [chunk([row, column], [2, 3]) for row in (0, 2) for column in (0, 3)]
    bricks = [chunk([0, 0], [1, 3]), chunk([0, 3], [1, 1]), chunk([1, 0], [1, 1]), chunk([1, 1], [1, 3])]
    empty = [chunk([0], [4]), chunk([4], [0], length=0)]
    tensors = table([4, 6], *rows) | {"y": table([2, 4], *bricks)["x"], "z": table([4], *empty)["x"]}
    tensors |= {"scalar": table([], chunk([], []))["x"], "none": table([0, 3], chunk([0, 0], [0, 3]))["x"]}
    assert [len(one.chunks) for one in read_tensors(tensors, FILES).values()] == [4, 4, 2, 1, 1]


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".", "..", "/etc/passwd", "a\0"])
def test_files_lie_in_their_folder(name: str) -> None:
    with pytest.raises(ValueError, match="lies outside the folder"):
        read_files({name: [3, "0" * 64]})


def test_a_checkpoint_with_a_hole_is_not_loaded(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    save_checkpoint(tmp_path / "it", {"model": model}, ALONE)
    record = json.loads((tmp_path / "it" / "checkpoint.json").read_text())
    file = tmp_path / "it" / "cell_0" / "index.json"
    index = json.loads(file.read_text())
    entry = index["tensors"]["model/weight"]["chunks"][0]
    entry[0][0] = -2
    file.write_text(json.dumps(index))
    record["indexes"]["cell_0"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "it" / "checkpoint.json").write_text(sealed_json(record))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match="offsets of 'model/weight' must be integers from 0"):
        load_checkpoint(tmp_path / "it", {"model": model}, ALONE)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


# Archives of torch.save -----------------------------------------------------------------------------------------------


class Grows:
    """An object whose pickle makes an array of bytes of any length."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (10**12,)


def saved(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def compressed() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**8))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (lambda: compressed(), "compressed"),
        (lambda: saved(Grows()), "it would call __builtin__ bytearray"),
        (lambda: saved({"t": torch.zeros(1).expand(10**12)}), "bytes in 4 bytes of memory"),
        (lambda: saved(torch.zeros(3).to_sparse()), "dense ones are kept|something else"),
        (lambda: saved([1, Privacy(1.0, 1.0)]), "something else than tensors and plain values"),
        (lambda: pickle.dumps([1]), "no archive"),
        (lambda: b"", "no archive"),
        (lambda: saved(nested(300)), "nested more than|something else"),
    ],
)
def test_an_archive_that_grows_or_calls_is_refused(data: Any, told: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=told):
        load_archive(data())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_an_archive_is_read_as_torch_reads_it() -> None:
    shared = [torch.arange(4.0)]
    content = {"a": shared, "b": shared, "c": (1, None, "x"), 3: torch.zeros(2).expand(3, 2)}
    read = load_archive(saved(content))
    assert read["a"] is read["b"] and torch.equal(read["a"][0], torch.arange(4.0)) and read[3].shape == (3, 2)
    with pytest.raises(ValueError, match="and 100 are read at most"):
        load_archive(saved(content), limit=100)


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plain",
    [
        {"__tuple__": 3},
        {"__pairs__": [1]},
        {"__pairs__": [[[], 1]]},
        {"__float__": []},
        {"__dtype__": "nn"},
        {"__tensor__": "x"},
        {"__tensor__": []},
        {"__counter__": {"a": 1}},
        nested(2000),
    ],
    ids=range(9),
)
def test_plain_values_that_are_not_written_so_are_refused(plain: Any) -> None:
    with pytest.raises(ValueError, match="plain value|data type|could not convert|unpack"):
        from_plain(plain, {})


def test_names_of_data_types_import_nothing() -> None:
    assert dtype_of("bfloat16") is torch.bfloat16
    for name in ("nn", "onnx", "compile", "float99", "", None, 3, ["float32"]):
        with pytest.raises(ValueError, match="no data type of torch"):
            dtype_of(name)


@pytest.mark.parametrize(
    "spent",
    [
        [float("inf"), "cell", 3, 1],
        [float("nan"), "cell", 3, 1],
        [-1.0, "cell", 3, 1],
        [1.0, "cell", 3, 0.5],
        [1.0, "cell", 3.0, 1],
        [1.0, "cell", True, 1],
        [1.0, "cell", 3, "1"],
        [1.0, "cell", 3, 10**400],
        [1.0, "nobody", 3, 1],
        [1.0, "cell", 3],
        "x",
    ],
    ids=repr,
)
def test_an_accountant_takes_no_state_that_would_cost_nothing(spent: Any) -> None:
    accountant = Accountant(Privacy(1.0, 1.0))
    accountant.spend(3)
    for take in (accountant.load_state_dict, accountant.cover):
        with pytest.raises(CheckpointError, match="the state is not that of a privacy accountant"):
            take({"spent": [spent]})
    assert accountant.rounds == 1


def test_a_saved_server_does_not_replace_methods_or_parameters() -> None:
    optimizer = torch.optim.SGD([torch.zeros(2)], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for options in ({"params": []}, {"lr": "0.1"}, {"lr": float("nan")}, {"momentum": True}, {3: 1}, [1]):
        with pytest.raises(CheckpointError, match="the saved option"):
            load_options(optimizer, {**options} if isinstance(options, dict) else options)
    for state in ({"step": 3}, {"get_lr": "x"}, {"optimizer": None}, {"gamma": None}, {"base_lrs": [0.1, 0.2]}, None):
        with pytest.raises(CheckpointError, match="the saved (schedule|value)"):
            load_schedule(schedule, state)
    load_options(optimizer, {"lr": 0.05})
    load_schedule(schedule, {**schedule.state_dict(), "last_epoch": 7})
    assert optimizer.param_groups[0]["lr"] == 0.05 and schedule.last_epoch == 7
