"""What is stored is checked before memory is taken: tables of tensors, archives, records, states."""

from __future__ import annotations

import collections
import copy
import hashlib
import io
import json
import os
import pickle
import random
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from xffl.aggregation.privacy import Accountant, Privacy
from xffl.checkpoint import load_checkpoint, save_checkpoint
from xffl.checkpoint.damage import check_damage
from xffl.checkpoint.format import read_pointer, read_record
from xffl.checkpoint.opened import OpenFolder
from xffl.checkpoint.tables import read_files, read_tensors
from xffl.checkpoint.torch_files import load_archive
from xffl.cluster.run_token import token_of
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.replicas.plain_values import from_plain
from xffl.distributed.values.sharding import dtype_of
from xffl.errors import CheckpointError, XfflError
from xffl.files import read_bytes, read_sealed, read_text, sealed_json
from xffl.training.loggers import LineFile, cut_lines
from xffl.training.mixins.state import read_place_file

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


def archive(steps: bytes, memory: bytes = b"") -> bytes:
    """An archive whose pickle has these steps, and the memory of one tensor."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("a/data.pkl", b"\x80\x02" + steps + b".")
        file.writestr("a/byteorder", "little")
        file.writestr("a/version", "3\n")
        file.writestr("a/data/0", memory)
    return stream.getvalue()


def text(content: str) -> bytes:
    return b"X" + len(content).to_bytes(4, "little") + content.encode()


def doubled() -> bytes:
    """A tuple of a tuple twice, and so on 40 times; its place in the memory is 40."""
    steps = [b"h" + bytes([step]) + b"h" + bytes([step]) + b"\x86q" + bytes([step + 1]) for step in range(40)]
    return b"K\x01q\0" + b"".join(steps)


def twice(value: Any, times: int = 40) -> Any:
    for _ in range(times):
        value = type(value)((value, value))
    return value


def tensor_of(elements: int) -> bytes:
    number = b"J" + elements.to_bytes(4, "little")
    storage = text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + number + b"tQ"
    shape = b"K\0" + number + b"\x85K\x01\x85\x89"
    return b"ctorch._utils\n_rebuild_tensor_v2\n((" + storage + shape + b"ccollections\nOrderedDict\n)RtR"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (lambda: archive(doubled() + b"}h\x28K\x02s"), "makes far more of its values"),
        (lambda: archive(doubled() + b"c__builtin__\nset\n]h\x28a\x85R"), "makes far more of its values"),
        (lambda: archive(b"ccollections\nOrderedDict\n]K\x01K\x02\x86a\x85R"), "not made of"),
        (lambda: saved(twice([])), "repeats 80 values"),
        (lambda: saved({1: twice(())}), "repeats .* values"),
        (lambda: archive(b"]q\0h\0a"), "holds itself"),
        (lambda: archive(b"]" * 100_000), "leaves values over"),
        (lambda: archive(b"K\x01" + b"\x85" * 100_000), "nested more than 200 deep"),
        (lambda: archive(b"}\x8a\x08" + (2**61 - 1).to_bytes(8, "little") + b"Ns"), "too large"),
        (lambda: archive(b"ctorch\nTensor\n(J\x00\x00\x00\x7ftR"), "call torch.Tensor"),
        (lambda: archive(b"ctorch.storage\nUntypedStorage\n(J\x00\x00\x00\x7ftR"), "call torch.storage.UntypedStorage"),
        (
            lambda: archive(
                b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch\nTensor\nctorch\nTensor\nJ\x00\x00\x00\x7f\x85}tR"
            ),
            "call torch.Tensor for a tensor",
        ),
        (lambda: archive(b"c_codecs\nencode\n" + text("a") + text("idna") + b"\x86R"), "not made of"),
        (lambda: archive(tensor_of(1000), bytes(4)), "which the archive does not hold"),
        (lambda: archive(b"0"), "a step POP"),
    ],
)
def test_a_pickle_that_asks_for_work_or_memory_that_it_does_not_have_is_refused(data: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load_archive(data())


def test_what_torch_writes_of_tensors_and_plain_values_is_read() -> None:
    model = nn.Linear(2, 2)
    named = torch.ones(2)
    named.told = 1  # type: ignore[attr-defined]
    content = [
        model.state_dict(),
        {"lr": 1e-3, (1, (2, "a")): None, -(2**60): [True, 10**30], 0.5: b"bytes"},
        collections.Counter({3: 1}),
        {1, (2, 3)},
        (torch.Size([2]), torch.float32, torch.device("cpu"), 1 + 2j),
        nn.Parameter(torch.ones(2), requires_grad=False),
        named,
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.ones(4)[1:3],
        [(0.9, 0.999)] * 3,
        random.getstate(),
    ]
    read = load_archive(saved(content))
    assert str(read) == str(content)
    assert torch.equal(load_archive(archive(tensor_of(3), bytes(12))), torch.zeros(3))


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


# Files with holes -----------------------------------------------------------------------------------------------------


def read_token(file: Path) -> object:
    file.chmod(0o600)
    return token_of({"XFFL_TOKEN_FILE": str(file)})


def read_in_folder(file: Path) -> object:
    with OpenFolder(file.parent, ()) as folder:
        return folder.read_bytes(file.name)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("file", read_bytes),
        ("file", read_text),
        ("file", read_sealed),
        ("file", read_in_folder),
        ("place.pt", read_place_file),
        ("checkpoint.json", lambda file: read_record(file.parent)),
        ("log.csv", lambda file: LineFile(file).lines),
        ("log.csv", lambda file: LineFile(file).append("line\n")),
        ("log.csv", lambda file: cut_lines(file, lambda number, line: True)),
        ("token", read_token),
    ],
)
def test_a_file_that_says_that_it_is_endless_is_refused_before_it_is_read(name: str, read: Any, tmp_path: Path) -> None:
    file = tmp_path / name
    file.touch()
    os.truncate(file, 2**43)
    with pytest.raises(
        (OSError, XfflError), match=rf"it has {2**43} bytes; at most \d+ are read.*{name}|{name}.*it has"
    ):
        read(file)


def test_a_pointer_that_is_endless_is_as_one_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latest").touch()
    os.truncate(tmp_path / "latest", 2**43)
    assert read_pointer(tmp_path) is None
    with pytest.raises(CheckpointError, match=f"names no checkpoint .*it has {2**43} bytes"):
        check_damage(tmp_path, lambda: None)
