"""Tokens: text files and memory-mapped arrays as windows of tokens, each with the tokens that follow."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from xffl.checks import integer
from xffl.errors import ConfigError
from xffl.training.data.rng import Indices
from xffl.training.data.tokenizers import Tokenizer, find_tokenizer, vocabulary_size_of

__all__ = ["TokenDataset", "Tokens", "encoded", "open_tokens", "write_tokens"]

Tokens = npt.NDArray[Any]
"""A 1-D array of token numbers."""
FORMS = ("pair", "causal_lm")
CHUNK = 1 << 24
"""Tokens that are looked at in one go."""
PROBES, PROBE_TOKENS = 64, 4096
"""How many places of an array its identity is made of, and how long they are."""


class TokenDataset(Dataset[Any]):
    """Windows of equal length over a 1-D array of tokens.

    A window is the tuple ``(inputs, targets)`` of int64 tensors of ``sequence_length``, where the targets are the
    tokens one place on; or, with ``form="causal_lm"``, ``{"input_ids": ..., "labels": ...}`` of the same tokens twice,
    as Hugging Face models take them, which shift by themselves.

    The array may be memory-mapped: then a window is read when it is asked for, and the ranks of a node share the pages.

    :param tokens: 1-D array of whole numbers, or the path of one for :func:`open_tokens`.
    :param sequence_length: Tokens of a window.
    :param stride: Tokens from one window's start to the next one's; ``None`` means ``sequence_length``, so that each
        token is a target once.
    :param end: The token that ends a document, where windows must not reach from one document into the next. Documents
        that are shorter than a window are left out, and so is the rest of each.
    :param form: ``"pair"`` or ``"causal_lm"``.
    :param vocabulary_size: One more than the greatest token; ``None`` takes what stands beside the file, if anything.
    :raises ConfigError: if an argument cannot be meant, or there is no window.
    """

    is_random = False
    """A window is always the same: loaders need not seed what it does not draw."""
    _digest: str

    def __init__(
        self,
        tokens: npt.ArrayLike | str | os.PathLike[str],
        *,
        sequence_length: int,
        stride: int | None = None,
        end: int | None = None,
        form: Literal["pair", "causal_lm"] = "pair",
        vocabulary_size: int | None = None,
    ) -> None:
        self._path: Path | None = None
        if isinstance(tokens, str | os.PathLike):
            self._path = Path(tokens)
            tokens = open_tokens(self._path)
            vocabulary_size = vocabulary_size or _vocabulary_beside(self._path, len(tokens))
        self._tokens = _checked(np.asanyarray(tokens))
        self.sequence_length = integer("sequence_length", sequence_length, 1)
        self.stride = integer("stride", sequence_length if stride is None else stride, 1)
        if form not in FORMS:
            raise ConfigError(f"form {form!r} is unknown; give one of {', '.join(FORMS)}")
        self.end = None if end is None else integer("end", end, 0)
        self.vocabulary_size = None if vocabulary_size is None else integer("vocabulary_size", vocabulary_size, 1)
        self.form = form
        self._span = (0, len(self._tokens))
        self._lay()

    @classmethod
    def from_text(
        cls,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        tokenizer: Tokenizer | str = "bytes",
        **options: Any,
    ) -> TokenDataset:
        r"""Read UTF-8 text files into memory as one array of tokens; local.

        For text that is too large for that, or for many ranks on a node, use :func:`write_tokens` once.

        :param paths: A file, or several that follow each other.
        :param tokenizer: What :func:`find_tokenizer <xffl.training.data.tokenizers.find_tokenizer>` takes: ``"bytes"``,
            ``"characters"`` (of these files), an object with ``encode``, or a callable.
        :param \**options: Of :class:`TokenDataset`. With ``end`` each file is ended by that token.
        :return: The dataset; its ``vocabulary_size`` is the tokenizer's, where that says one.
        :raises ConfigError: if there is no such file, or an argument cannot be meant.
        """
        several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        texts = [_read_text(path) for path in several]
        found = find_tokenizer(tokenizer, texts)
        end = None if options.get("end") is None else integer("end", options["end"], 0)
        parts = [np.append(ids, end) if end is not None else ids for ids in encoded(texts, found)]
        options.setdefault("vocabulary_size", vocabulary_size_of(found))
        return cls(np.concatenate(parts) if parts else np.empty(0, dtype=np.int64), **options)

    def split(self, first: float) -> tuple[TokenDataset, TokenDataset]:
        """Cut the tokens in two, by position, such as for training and validation; no window is over the cut.

        :param first: Portion of the tokens that the first one gets, between 0 and 1.
        :return: Both, with the options of this one.
        :raises ConfigError: if the portion cannot be meant, or one of them would have no window.
        """
        if not 0.0 < first < 1.0:
            raise ConfigError(f"first {first!r} is no portion between 0 and 1; give one, such as 0.9")
        start, stop = self._span
        cut = start + round((stop - start) * first)
        return self._of_span(start, cut), self._of_span(cut, stop)

    @property
    def tokens(self) -> int:
        """Number of tokens that the windows are cut of."""
        return self._span[1] - self._span[0]

    @property
    def identity(self) -> str:
        """Hexadecimal digits that tell whether two datasets have the same windows.

        Made of the options, the length, and 64 places of the array: a resumed run notices other data without reading
        all of it.
        """
        if not self._digest:
            start, stop = self._span
            told = (self.sequence_length, self.stride, self.end, self.form, start, stop)
            hashed = hashlib.sha256(repr(told).encode())
            for place in np.linspace(start, max(start, stop - PROBE_TOKENS), PROBES).astype(np.int64).tolist():
                probe = self._tokens[place : min(place + PROBE_TOKENS, stop)]
                hashed.update(probe.astype("<i8").tobytes())
            self._digest = hashed.hexdigest()
        return self._digest

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if not -self._count <= index < self._count:
            raise IndexError(f"window {index} is outside the {self._count} of the dataset")
        start = self._start_of(index % self._count)
        # A copy: pages of a file are not to be written to.
        window = torch.from_numpy(self._tokens[start : start + self._window].astype(np.int64))
        if self.form == "causal_lm":
            return {"input_ids": window, "labels": window.clone()}
        return window[:-1], window[1:]

    def __getstate__(self) -> dict[str, Any]:
        # A worker opens the file by itself; pickled, the whole array would be copied.
        return {**self.__dict__, "_tokens": None} if self._path is not None else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._path is not None:
            self._tokens = open_tokens(self._path)

    @property
    def _window(self) -> int:
        """Tokens that are read for a window: those of pairs have one more, the last target."""
        return self.sequence_length + (self.form == "pair")

    def _of_span(self, start: int, stop: int) -> TokenDataset:
        other = object.__new__(TokenDataset)
        other.__dict__.update(self.__dict__)
        other._span = (start, stop)
        other._lay()
        return other

    def _lay(self) -> None:
        """Find where the windows of each document begin."""
        start, stop = self._span
        self._digest = ""
        self._starts: Indices | None = None
        self._windows_before: Indices | None = None
        if self.end is None:
            self._count = max(0, (stop - start - self._window) // self.stride + 1)
        else:
            ends = _places_of(self._tokens[start:stop], self.end) + start + 1
            borders = np.unique(np.concatenate(([start], ends, [stop])))
            counts = np.maximum(0, (np.diff(borders) - self._window) // self.stride + 1)
            self._starts, counts = borders[:-1][counts > 0], counts[counts > 0]
            self._windows_before = np.cumsum(counts) - counts
            self._count = int(counts.sum())
        if not self._count:
            raise ConfigError(
                f"{stop - start} tokens have no window of {self._window}; give more text or a smaller sequence_length"
            )

    def _start_of(self, index: int) -> int:
        if self._starts is None or self._windows_before is None:
            return self._span[0] + index * self.stride
        document = int(np.searchsorted(self._windows_before, index, side="right")) - 1
        return int(self._starts[document] + (index - self._windows_before[document]) * self.stride)


def open_tokens(path: str | os.PathLike[str], dtype: npt.DTypeLike | None = None) -> Tokens:
    """Map a file of tokens into memory; local. Ranks of a node that open the same file share its pages.

    :param path: A ``.npy`` file, or a raw array of numbers (``.bin`` and others).
    :param dtype: Of a raw array; ``None`` means uint16.
    :return: A read-only 1-D array.
    :raises ConfigError: if there is no such file, or it holds no 1-D array of whole numbers.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no file of tokens {str(file)!r}; give what write_tokens wrote")
    try:
        if file.suffix == ".npy":
            tokens: Tokens = np.load(file, mmap_mode="r", allow_pickle=False)
        else:
            tokens = np.memmap(file, dtype=dtype or np.uint16, mode="r")
    except (ValueError, OSError, EOFError, TypeError) as error:
        raise ConfigError(f"{str(file)!r} holds no array of tokens ({error}); write it with write_tokens") from error
    return _checked(tokens)


def write_tokens(
    path: str | os.PathLike[str],
    documents: Iterable[npt.ArrayLike],
    *,
    vocabulary_size: int,
    end: int | None = None,
) -> int:
    """Write the tokens of documents one after the other into a file; a reader finds the whole of it or nothing.

    The documents are taken one by one, so that they need not fit into memory. A token takes two bytes, or four where
    the vocabulary has more than 65,536. ``PATH.json`` beside the file says how large the vocabulary is.

    Local: let one rank of each node do it (or one of all, on a shared disk), and the others open it behind a barrier.

    :param path: Where to write, such as ``tokens.npy``; its folder exists.
    :param documents: The tokens of each document, as of :func:`encoded`.
    :param vocabulary_size: One more than the greatest token.
    :param end: A token to put behind each document; give the same to :class:`TokenDataset`.
    :return: How many tokens were written.
    :raises ConfigError: if a token is outside the vocabulary, or the path does not end in ``.npy``.
    """
    target = Path(path)
    if target.suffix != ".npy":
        raise ConfigError(f"the file of tokens {target.name!r} does not end in .npy; name it so")
    size = integer("vocabulary_size", vocabulary_size, 1)
    if size > 1 << 32:
        raise ConfigError(f"vocabulary_size {size} is more than four bytes can count; give the tokenizer's")
    dtype = np.dtype("<u2" if size <= 1 << 16 else "<u4")
    tail = [] if end is None else [integer("end", end, 0)]
    count = 0
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            _write_header(file, dtype, 0)
            for number, document in enumerate(documents):
                ids = np.concatenate((_checked(np.asarray(document)).astype(np.int64), tail)).astype(np.int64)
                if len(ids) and not 0 <= ids.min() <= ids.max() < size:
                    raise ConfigError(
                        f"document {number} has tokens {ids.min()} to {ids.max()}, but the vocabulary has {size}; give "
                        "the vocabulary_size of the tokenizer that made them"
                    )
                file.write(ids.astype(dtype).tobytes())
                count += len(ids)
            file.seek(0)
            _write_header(file, dtype, count)
            file.flush()
            os.fsync(file.fileno())
        _about(target).unlink(missing_ok=True)  # a kill must not leave what tells of the tokens before
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _about(target).write_text(json.dumps({"vocabulary_size": size, "end": end, "tokens": count}) + "\n")
    return count


def encoded(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Encode texts one by one; local.

    :param texts: Documents.
    :param tokenizer: An object with ``encode``, or a callable.
    :yield: The tokens of each, as an int64 array.
    """
    encode = find_tokenizer(tokenizer).encode
    for text in texts:
        yield np.asarray(encode(text), dtype=np.int64)


def _checked(tokens: Tokens) -> Tokens:
    if tokens.ndim != 1 or (len(tokens) and not np.issubdtype(tokens.dtype, np.integer)):
        raise ConfigError(f"tokens are {tokens.dtype} of shape {tokens.shape}; give a 1-D array of whole numbers")
    return tokens


def _places_of(tokens: Tokens, wanted: int) -> Indices:
    """Return where a token is, reading a bounded number of tokens at once."""
    found = [np.flatnonzero(tokens[start : start + CHUNK] == wanted) + start for start in range(0, len(tokens), CHUNK)]
    return np.concatenate([np.empty(0, dtype=np.int64), *found]).astype(np.int64)


def _write_header(file: Any, dtype: np.dtype[Any], count: int) -> None:
    """Write the first bytes of a ``.npy`` file: equally many for every count."""
    header = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)


def _about(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _vocabulary_beside(path: Path, count: int) -> int | None:
    """Return the vocabulary's size as it stands beside a file of tokens, if it does."""
    about = _about(path)
    if not about.is_file():
        return None
    try:
        told = json.loads(about.read_text())
        size, tokens = int(told["vocabulary_size"]), int(told["tokens"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{str(about)!r} does not tell of {path.name} ({error}); write the tokens again") from error
    if tokens != count:
        raise ConfigError(f"{str(path)!r} has {count} tokens, but {about.name} says {tokens}; write the tokens again")
    return size


def _read_text(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # a mark of the byte order is no text
    except FileNotFoundError as error:
        raise ConfigError(f"there is no text file {str(path)!r}; give the path of one") from error
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}; give the path of a text file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} is no UTF-8 text ({error}); convert it") from error
