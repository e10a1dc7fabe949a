"""Tokens: text to numbers and back, and arrays of tokens, in memory or memory-mapped, as windows of equal length."""

from __future__ import annotations

import hashlib
import json
import os
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from xffl.checks import integer, one_of, shown
from xffl.errors import ConfigError
from xffl.files import read_fields, write_whole, written_whole
from xffl.reading import Fields
from xffl.training.data.rng import Indices

__all__ = [
    "ByteTokenizer",
    "CharacterTokenizer",
    "TokenDataset",
    "Tokenizer",
    "Tokens",
    "encoded",
    "find_tokenizer",
    "open_tokens",
    "vocabulary_size_of",
    "write_tokens",
]

Tokens = npt.NDArray[Any]
"""A 1-D array of token numbers."""
_MAX_CHARACTERS = 0x110000
"""The characters of Unicode"""
_MAX_ABOUT_BYTES = 2**16
ARRAY_ERRORS = (
    *(OSError, EOFError, ValueError, TypeError, OverflowError, MemoryError),
    *(SyntaxError, tokenize.TokenError, AttributeError, KeyError),
)
"""What NumPy raises where a file is no array, or is a damaged one"""
CHUNK = 1 << 24
"""Tokens that are looked at in one go."""
PROBES, PROBE_TOKENS = 64, 4096
"""How many places of an array its identity is made of, and how long they are."""


# Tokenizers -----------------------------------------------------------------------------------------------------------


class Tokenizer(Protocol):
    """What encodes a text: Hugging Face's tokenizers, those here, or a function that :func:`find_tokenizer` wraps."""

    def encode(self, text: str) -> Any:
        """Return the numbers of a text's tokens."""
        ...


class ByteTokenizer:
    """The bytes of UTF-8: 256 tokens, for every text."""

    vocabulary_size = 256

    def encode(self, text: str) -> npt.NDArray[Any]:
        """Return the bytes."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; bytes that are none become a replacement character."""
        return bytes(int(value) for value in ids).decode("utf-8", errors="replace")


class CharacterTokenizer:
    """A token for each character of a vocabulary.

    :param characters: The vocabulary; each character's number is its place.
    :raises ConfigError: if there is none, or one is there twice.
    """

    def __init__(self, characters: str) -> None:
        if not characters:
            raise ConfigError("a vocabulary must have at least one character")
        if len(set(characters)) != len(characters):
            twice = next(one for place, one in enumerate(characters) if one in characters[:place])
            raise ConfigError(f"a vocabulary must have each character once, got {twice!r} twice")
        self.characters = characters
        self._numbers = {character: number for number, character in enumerate(characters)}

    @classmethod
    def from_text(cls, texts: str | Iterable[str]) -> CharacterTokenizer:
        """Make the vocabulary of all characters of a text, sorted; local, and the same wherever the text is.

        :param texts: One or several.
        :return: The tokenizer.
        """
        distinct: set[str] = set()
        for text in [texts] if isinstance(texts, str) else texts:
            distinct.update(text)
        return cls("".join(sorted(distinct)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CharacterTokenizer:
        """Read a tokenizer from a file; local."""
        if not Path(path).exists():
            raise ConfigError(f"there is no vocabulary {str(path)!r}; give what CharacterTokenizer.save wrote")
        try:
            fields = read_fields(Path(path))
            characters = fields.any("characters")
            if not isinstance(characters, str):  # a list of characters
                characters = "".join(fields.list_of("characters", _MAX_CHARACTERS, _read_character))
            return cls(characters)
        except ConfigError as error:
            raise ConfigError(f"{str(path)!r} is not a vocabulary ({error}); save it again") from error

    @property
    def vocabulary_size(self) -> int:
        """Number of characters."""
        return len(self.characters)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the vocabulary as JSON; local."""
        write_whole(Path(path), json.dumps({"characters": self.characters}) + "\n")

    def encode(self, text: str) -> npt.NDArray[Any]:
        """Return the number of each character."""
        try:
            return np.fromiter(map(self._numbers.__getitem__, text), np.int64, len(text))
        except KeyError as error:
            raise ConfigError(
                f"the character {error.args[0]!r} is not in the vocabulary of {self.vocabulary_size} characters; make "
                "it of all texts, validation's among them"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text."""
        return "".join(self.characters[int(value)] for value in ids)


def _read_character(fields: Fields, name: str) -> str:
    character = fields.any(name)
    if not isinstance(character, str):
        fields.fail(f"{fields.place(name)} must be a character, got {shown(character)}")
    return character


def _of_function(encode: Callable[[str], Any], vocabulary_size: int | None = None) -> Tokenizer:
    """Return a function as a tokenizer."""
    # Objects of the tokenizers library hold their numbers as ids.
    return SimpleNamespace(
        encode=lambda text: getattr(encoded := encode(text), "ids", encoded), vocabulary_size=vocabulary_size
    )


def find_tokenizer(tokenizer: Any, texts: Sequence[str] | None = None) -> Tokenizer:
    """Return an object with ``encode`` for whatever counts as a tokenizer."""
    if tokenizer == "bytes":
        return ByteTokenizer()
    if tokenizer == "characters" and texts is not None:
        return CharacterTokenizer.from_text(texts)
    if hasattr(tokenizer, "convert_tokens_to_ids"):
        # Without the tokens that it puts around a text.
        return _of_function(partial(tokenizer.encode, add_special_tokens=False), len(tokenizer))
    if hasattr(tokenizer, "encode") and not isinstance(tokenizer, str):
        return _of_function(tokenizer.encode, vocabulary_size_of(tokenizer))
    if callable(tokenizer):
        return _of_function(tokenizer)
    raise ConfigError(
        f'tokenizer must be "bytes", "characters", an object with encode, or a function of a text, got {tokenizer!r}'
    )


def vocabulary_size_of(tokenizer: Any) -> int | None:
    """Return how many tokens a tokenizer has, ``None`` where it does not say so."""
    if hasattr(tokenizer, "get_vocab_size"):
        return int(tokenizer.get_vocab_size())
    size: int | None = getattr(tokenizer, "vocabulary_size", None)
    return len(tokenizer) if size is None and hasattr(tokenizer, "__len__") else size


# Windows --------------------------------------------------------------------------------------------------------------


class TokenDataset(Dataset[Any]):
    """Windows of equal length over a 1-D array of tokens.

    A window is the tuple ``(inputs, targets)`` of int64 tensors of ``sequence_length``, where the targets are the
    tokens one place on; or, with ``form="causal_lm"``, ``{"input_ids": ..., "labels": ...}`` of the same tokens twice,
    as Hugging Face models take them, which shift by themselves.

    The array may be memory-mapped: then a window is read when it is asked for, and the ranks of a node share the pages.

    :param tokens: 1-D array of integers, or the path of one for :func:`open_tokens`.
    :param sequence_length: Tokens of a window.
    :param stride: Tokens from one window's start to the next one's; ``None`` means ``sequence_length``, so that each
        token is a target once.
    :param end: The token that ends a document, where windows must not reach from one document into the next. Documents
        that are shorter than a window are left out, and so is the rest of each.
    :param form: ``"pair"`` or ``"causal_lm"``.
    :param vocabulary_size: One more than the greatest token; ``None`` takes what stands beside the file, if anything.
    :raises ConfigError: if an argument is invalid, or there is no window.
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
        one_of("form", form, ["pair", "causal_lm"])
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
        :param tokenizer: What :func:`find_tokenizer` takes: ``"bytes"``,
            ``"characters"`` (of these files), an object with ``encode``, or a callable.
        :param \**options: Of :class:`TokenDataset`. With ``end`` each file is ended by that token.
        :return: The dataset; its ``vocabulary_size`` is the tokenizer's, where that says one.
        :raises ConfigError: if there is no such file, or an argument is invalid.
        """
        texts = [_read_text(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
        known = find_tokenizer(tokenizer, texts)
        end = None if options.get("end") is None else integer("end", options["end"], 0)
        parts = [np.append(ids, end) if end is not None else ids for ids in encoded(texts, known)]
        options.setdefault("vocabulary_size", vocabulary_size_of(known))
        return cls(np.concatenate(parts) if parts else np.empty(0, dtype=np.int64), **options)

    def split(self, first: float) -> tuple[TokenDataset, TokenDataset]:
        """Cut the tokens in two, by position, such as for training and validation; no window is over the cut.

        :param first: Portion of the tokens that the first one gets, between 0 and 1.
        :return: Both, with the options of this one.
        :raises ConfigError: if the portion is invalid, or one of them would have no window.
        """
        if not 0.0 < first < 1.0:
            raise ConfigError(f"first must be a number between 0 and 1, such as 0.9, got {first!r}")
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
            options = (self.sequence_length, self.stride, self.end, self.form, start, stop)
            hashed = hashlib.sha256(repr(options).encode())
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
            self._starts = borders[:-1][counts > 0]
            counts = counts[counts > 0]
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


# Files ----------------------------------------------------------------------------------------------------------------


def open_tokens(path: str | os.PathLike[str], dtype: npt.DTypeLike | None = None) -> Tokens:
    """Map a file of tokens into memory; local. Ranks of a node that open the same file share its pages.

    :param path: A ``.npy`` file, or a raw array of numbers (``.bin`` and others).
    :param dtype: Of a raw array; ``None`` means uint16.
    :return: A read-only 1-D array.
    :raises ConfigError: if there is no such file, or it holds no 1-D array of integers.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no file of tokens {str(file)!r}; give what write_tokens wrote")
    try:
        if file.suffix == ".npy":
            tokens: Tokens = np.load(file, mmap_mode="r", allow_pickle=False)
        else:
            tokens = np.memmap(file, dtype=dtype or np.uint16, mode="r")
    except ARRAY_ERRORS as error:
        raise ConfigError(f"{str(file)!r} is not an array of tokens ({error}); write it with write_tokens") from error
    return _checked(tokens)


def write_tokens(
    path: str | os.PathLike[str], documents: Iterable[npt.ArrayLike], *, vocabulary_size: int, end: int | None = None
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
        raise ConfigError(f"the name of a file of tokens must end in .npy, got {target.name!r}")
    size = integer("vocabulary_size", vocabulary_size, 1, 1 << 32)  # tokens of at most four bytes
    dtype = np.dtype("<u2" if size <= 1 << 16 else "<u4")
    tail = [] if end is None else [integer("end", end, 0)]
    count = 0
    with written_whole(target) as file:
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
        _about(target).unlink(missing_ok=True)  # a kill must not leave what tells of the tokens before
    write_whole(_about(target), json.dumps({"vocabulary_size": size, "end": end, "tokens": count}) + "\n")
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
        raise ConfigError(f"tokens must be a 1-D array of integers, got {tokens.dtype} of shape {tokens.shape}")
    return tokens


def _places_of(tokens: Tokens, wanted: int) -> Indices:
    """Return where a token is, reading a bounded number of tokens at once."""
    places = [np.flatnonzero(tokens[start : start + CHUNK] == wanted) + start for start in range(0, len(tokens), CHUNK)]
    return np.concatenate([np.empty(0, dtype=np.int64), *places]).astype(np.int64)


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
        about_it = read_fields(about, hint="write the tokens again", limit=_MAX_ABOUT_BYTES)
        size, tokens = about_it.integer("vocabulary_size", 1), about_it.integer("tokens")
    except ConfigError as error:
        raise ConfigError(f"{str(about)!r} does not describe {path.name} ({error})") from error
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
        raise ConfigError(f"{str(path)!r} is not UTF-8 text ({error}); convert it") from error
