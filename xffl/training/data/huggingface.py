"""Datasets of Hugging Face's ``datasets`` library (the extra ``hf``), from local files: nothing is fetched.

A ``datasets.Dataset`` goes into a loader as it is. These functions open one, and make tokens of its texts.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xffl.errors import ConfigError
from xffl.extras import optional_import
from xffl.training.data.tokens import TokenDataset, Tokens, find_tokenizer, vocabulary_size_of, write_tokens

__all__ = ["encoded_column", "open_dataset", "token_dataset"]

READERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""The library's reader of each kind of file."""
TOGETHER = 1000
"""Texts that are encoded at once."""


def open_dataset(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    split: str | None = None,
    columns: Sequence[str] | None = None,
    form: str | None = "torch",
    cache: str | os.PathLike[str] | None = None,
) -> Any:
    """Open a map-style dataset from local files; local.

    Files that are not in Arrow's form are converted once, into the library's cache; it locks that, so all ranks may
    call this.

    :param path: A folder that ``save_to_disk`` wrote, or one or more files of one kind: text (a sample each line),
        JSON lines, CSV, Parquet or Arrow.
    :param split: Which of several that a folder holds.
    :param columns: Those that samples have; ``None`` keeps all.
    :param form: What samples are made of: ``"torch"``, ``"numpy"``, or ``None`` for plain Python.
    :param cache: Folder of the cache; ``None`` is the library's own.
    :return: A ``datasets.Dataset``, for :class:`CellLoader <xffl.training.data.loaders.CellLoader>`.
    :raises ConfigError: if the library is missing, there is no such file, split or column, or the kind is not known.
    """
    with optional_import("hf", "data of Hugging Face needs datasets"):
        import datasets  # type: ignore[import-untyped, unused-ignore]
    files = [Path(path)] if isinstance(path, str | os.PathLike) else [Path(name) for name in path]
    missing = [str(file) for file in files if not file.exists()]
    if missing or not files:
        raise ConfigError(f"there is no data at {missing}; give a folder of save_to_disk, or files")
    if len(files) == 1 and files[0].is_dir():
        loaded = _read_folder(datasets, files[0], split)
    else:
        loaded = _read_files(datasets, files, split, cache)
    if columns is not None:
        unknown = sorted(set(columns) - set(loaded.column_names))
        if unknown:
            raise ConfigError(f"there are no columns {unknown}; choose of {loaded.column_names}")
        loaded = loaded.select_columns(list(columns))
    return loaded.with_format(form)


def encoded_column(dataset: Any, tokenizer: Any, *, column: str = "text") -> Iterator[Tokens]:
    """Encode the texts of a dataset's column, or a stream's, one after the other: documents for ``write_tokens``.

    ``tokenizer`` is what :func:`find_tokenizer <xffl.training.data.tokens.find_tokenizer>` takes, except
    ``"characters"``.
    """
    names = dataset.column_names
    if names is not None and column not in names:
        raise ConfigError(f"there is no column {column!r}; choose of {names}")
    plain = dataset.with_format(None)
    if hasattr(tokenizer, "convert_tokens_to_ids"):
        for batch in plain.iter(TOGETHER):
            # All at once: a fast tokenizer shares them out over threads.
            texts = [_text_of(text, column) for text in batch[column]]
            for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
                yield np.asarray(ids, dtype=np.int64)
    else:
        encode = find_tokenizer(tokenizer).encode
        for row in plain:
            yield np.asarray(encode(_text_of(row[column], column)), dtype=np.int64)


def token_dataset(
    dataset: Any, tokenizer: Any, *, column: str = "text", path: str | os.PathLike[str] | None = None, **options: Any
) -> TokenDataset:
    r"""Encode a column, put the texts one behind the other, and cut blocks of equal length; local.

    :param dataset: A ``datasets.Dataset``.
    :param tokenizer: As for :func:`encoded_column`.
    :param column: Of texts.
    :param path: A ``.npy`` file to write the tokens into and to map into memory. It is written anew: let one rank of
        each node call this, and the others ``TokenDataset(path, ...)`` behind a barrier. ``None`` keeps the tokens in
        this process's memory.
    :param \**options: Of :class:`TokenDataset <xffl.training.data.tokens.TokenDataset>`; ``end`` is put
        behind each text.
    :return: The blocks; ``form="causal_lm"`` makes them what Hugging Face models take.
    :raises ConfigError: if there is no such column, no text, or an argument is invalid.
    """
    known = tokenizer if hasattr(tokenizer, "convert_tokens_to_ids") else find_tokenizer(tokenizer)
    end = options.get("end")
    size = options.get("vocabulary_size") or vocabulary_size_of(known)
    texts = encoded_column(dataset, known, column=column)
    if path is None:
        parts = [ids if end is None else np.append(ids, end) for ids in texts]
        tokens = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        return TokenDataset(tokens, **{**options, "vocabulary_size": size})
    if size is None:
        raise ConfigError("the tokenizer does not say how many tokens it has; give vocabulary_size")
    write_tokens(path, texts, vocabulary_size=size, end=end)
    return TokenDataset(path, **options)


def _text_of(value: object, column: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"column {column!r} must hold texts, got {value!r}; name another, or filter such rows out")
    return value


def _read_folder(datasets: Any, folder: Path, split: str | None) -> Any:
    try:
        dataset = datasets.load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{str(folder)!r} was not written by save_to_disk; give a folder that was, or files"
        ) from error
    if not hasattr(dataset, "keys"):
        if split is not None:
            raise ConfigError(f"{str(folder)!r} has no splits; leave split={split!r} out")
        return dataset
    if split not in dataset:
        raise ConfigError(f"{str(folder)!r} has the splits {sorted(dataset)}, not {split!r}; choose one with split=")
    return dataset[split]


def _read_files(datasets: Any, files: list[Path], split: str | None, cache: str | os.PathLike[str] | None) -> Any:
    kinds = sorted({file.suffix for file in files})
    if len(kinds) != 1 or kinds[0] not in READERS:
        raise ConfigError(f"files that end in {kinds} cannot be read together; give files of one of {sorted(READERS)}")
    if split is not None:
        raise ConfigError(f"files have no splits; leave split={split!r} out, and give the files of one")
    try:
        return datasets.load_dataset(
            READERS[kinds[0]],
            data_files=[glob.escape(str(file)) for file in files],  # which the library takes for patterns
            split="train",
            cache_dir=None if cache is None else str(cache),
        )
    except (StopIteration, OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # it stops at empty files
        reason = f"{type(error).__name__}: {error.__cause__ or error}"
        raise ConfigError(
            f"{[str(file) for file in files]} cannot be read as {kinds[0]} ({reason}); see them"
        ) from error
