"""What training reads: configuration files and words, partitions, vocabularies, records of a run that goes on."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.chaos.inputs.parser import Parser, command
from tests.chaos.inputs.parsers_planning import words_of
from tests.unit.test_run_report import run_files
from xffl.aggregation.algorithms.registry import resolve_algorithm
from xffl.aggregation.compression import codec_of
from xffl.distributed.several_worlds.cell_notes import LoneNotes
from xffl.integrations.checkpoints import CellCheckpoints, WholeCheckpoint
from xffl.integrations.transformers.trainer_files import TrainerFiles
from xffl.naming import Writer
from xffl.training.data.partition import Partition, quantity
from xffl.training.data.tokens import CharacterTokenizer, TokenDataset, write_tokens
from xffl.training.loggers import cut_lines
from xffl.training.run_directory import _keeper, _read_json
from xffl.training.run_lock import _Owner


def project(folder: Path) -> list[bytes]:
    """Make the project that ``xffl init`` writes; return its configuration."""
    command("init", str(folder / "demo"))
    return [(folder / "demo" / "config.yaml").read_bytes()]


def inside(folder: Path, *words: str) -> None:
    before, path = os.getcwd(), list(sys.path)
    os.chdir(folder)
    try:
        command(*words)
    finally:
        os.chdir(before)
        sys.path[:] = path


def print_config(content: bytes, folder: Path) -> None:
    (folder / "demo" / "config.yaml").write_bytes(content)
    inside(folder / "demo", "exec", "config.yaml", "--print_config")


def submit_config(content: bytes, folder: Path) -> None:
    (folder / "demo" / "config.yaml").write_bytes(content)
    inside(folder / "demo", "submit", "--dry-run", "config.yaml")


def words_examples(folder: Path) -> list[bytes]:
    project(folder)
    return [
        b"--training.epochs 3 --training.max_steps=100 --federation.every 5 --experiment.name other",
        b"--launch.processes 4 --launch.federated [2,2] --federation.algorithm fedavgm:momentum=0.9",
    ]


def print_words(content: bytes, folder: Path) -> None:
    words = [word for word in words_of(content) if word not in ("-h", "--help")]
    inside(folder / "demo", "exec", "config.yaml", *words, "--print_config")


def partition_examples(folder: Path) -> list[bytes]:
    quantity(100, 3, alpha=1.0, seed=1).save(folder / "parts.npz")
    return [(folder / "parts.npz").read_bytes()]


def read_partition(content: bytes, folder: Path) -> None:
    (folder / "parts.npz").write_bytes(content)
    Partition.load(folder / "parts.npz")


def vocabulary_examples(folder: Path) -> list[bytes]:
    CharacterTokenizer("abc\n\u00e9").save(folder / "characters.json")
    return [(folder / "characters.json").read_bytes()]


def read_vocabulary(content: bytes, folder: Path) -> None:
    (folder / "characters.json").write_bytes(content)
    CharacterTokenizer.load(folder / "characters.json").encode("a")


def token_examples(folder: Path) -> list[bytes]:
    write_tokens(folder / "tokens.npy", [np.arange(50)], vocabulary_size=64)
    return [(folder / "tokens.npy.json").read_bytes()]


def read_description(content: bytes, folder: Path) -> None:
    (folder / "tokens.npy.json").write_bytes(content)
    TokenDataset(folder / "tokens.npy", sequence_length=8)


def array_examples(folder: Path) -> list[bytes]:
    write_tokens(folder / "tokens.npy", [np.arange(50)], vocabulary_size=64)
    (folder / "tokens.npy.json").unlink()
    return [(folder / "tokens.npy").read_bytes()]


def read_tokens(content: bytes, folder: Path) -> None:
    (folder / "tokens.npy").write_bytes(content)
    TokenDataset(folder / "tokens.npy", sequence_length=8)


def records(name: str) -> list[bytes]:
    return [run_files()[name].encode()]


def cut_records(content: bytes, folder: Path) -> None:
    file = folder / "cell_0.jsonl"
    file.write_bytes(content)
    cut_lines(file, _keeper(file, 10, None))
    file.write_bytes(content)
    cut_lines(file, _keeper(file, 10, 5), drops_torn=True)


def table_examples(folder: Path) -> list[bytes]:
    rows = [f"1790000000.5,{step},0,{8 * step},train/loss,{3.0 / step}\r\n" for step in range(1, 20)]
    return [("time,step,epoch,samples,name,value\r\n" + "".join(rows)).encode()]


def cut_table(content: bytes, folder: Path) -> None:
    file = folder / "cell_0.csv"
    file.write_bytes(content)
    cut_lines(file, _keeper(file, 10, None))


def read_about(content: bytes, folder: Path) -> None:
    (folder / "environment.json").write_bytes(content)
    _read_json(folder / "environment.json")


def owner_examples(folder: Path) -> list[bytes]:
    return [json.dumps(asdict(_Owner.here())).encode()]


def read_owner(content: bytes, folder: Path) -> None:
    owner = _Owner.parse(content.decode("utf-8", errors="replace"))
    if owner is not None:
        str(owner).encode()


SPECS = (b"fedavgm:momentum=0.9", b"fedadam:lr=1e-2,betas=(0.9,0.99)", b"fedavg", b"fedprox:mu=0.1")


def read_algorithm(content: bytes, folder: Path) -> None:
    resolve_algorithm(content.decode("utf-8", errors="replace"), writer=Writer.USER)


def read_codec(content: bytes, folder: Path) -> None:
    codec_of(content.decode("utf-8", errors="replace"))


def own_checkpoints(folder: Path) -> CellCheckpoints:
    """Return the checkpoints that a Trainer has saved in the folder, with nothing in them but what federate adds."""
    state: Any = SimpleNamespace(cell=0, cells=1, cell_rank=0, cell_size=1, is_first_of_job=False)
    return CellCheckpoints(TrainerFiles(folder, None), state, LoneNotes(), ["weight"])


def marker_examples(folder: Path) -> list[bytes]:
    (folder / "checkpoint-2").mkdir(exist_ok=True)
    own_checkpoints(folder).save(
        folder / "checkpoint-2", 2, 1, {"rounds": {"since": 1, "values": torch.ones(3)}, "count": 2.0}
    )
    return [(folder / "checkpoint-2" / "xffl_cell.json").read_bytes()]


def read_marker(content: bytes, folder: Path) -> None:
    (folder / "checkpoint-2" / "xffl_cell.json").write_bytes(content)
    own_checkpoints(folder).agree("", starts_over=False)


def rounds_examples(folder: Path) -> list[bytes]:
    marker_examples(folder)
    return [(folder / "checkpoint-2" / "xffl_rounds_0.pt").read_bytes()]


def read_rounds(content: bytes, folder: Path) -> None:
    (folder / "checkpoint-2" / "xffl_rounds_0.pt").write_bytes(content)
    own_checkpoints(folder).load(WholeCheckpoint(folder / "checkpoint-2", 2, 1))


PARSERS = (
    Parser("records: JSON lines", "lines", lambda folder: records("metrics/cell_0.jsonl"), cut_records),
    Parser("records: CSV", "text", table_examples, cut_table),
    Parser("run: environment.json", "json", lambda folder: [b'{"torch": "2.13", "hosts": ["a"]}'], read_about),
    Parser("run: owner of the lock", "json", owner_examples, read_owner),
    Parser("algorithm", "text", lambda folder: list(SPECS), read_algorithm),
    Parser("codec", "text", lambda folder: [b"int8", b"topk:0.01", b"bf16"], read_codec),
    Parser("configuration: file", "yaml", project, print_config),
    Parser("configuration: words", "text", words_examples, print_words),
    Parser("configuration: submit", "yaml", project, submit_config, 0.5),
    Parser("partition file", "bytes", partition_examples, read_partition),
    Parser("vocabulary", "json", vocabulary_examples, read_vocabulary),
    Parser("tokens: description", "json", token_examples, read_description),
    Parser("tokens: array", "bytes", array_examples, read_tokens),
    Parser("federate: marker", "json", marker_examples, read_marker),
    Parser("federate: rounds", "bytes", rounds_examples, read_rounds),
)
