"""Tokenizers: text to numbers and back, by bytes, by characters, or by what the user brings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from xffl.errors import ConfigError

__all__ = ["ByteTokenizer", "CharacterTokenizer", "Tokenizer", "find_tokenizer", "vocabulary_size_of"]


class Tokenizer(Protocol):
    """What encodes a text: Hugging Face's tokenizers, those here, or a function that :func:`find_tokenizer` wraps."""

    def encode(self, text: str) -> Any:
        """Return the numbers of a text's tokens."""
        ...


class ByteTokenizer:
    """The bytes of UTF-8: 256 tokens, for every text."""

    vocabulary_size = 256

    def encode(self, text: str) -> npt.NDArray[Any]:
        """Return the bytes.

        :param text: Any.
        :return: Numbers from 0 to 255.
        """
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; bytes that are none become a replacement character.

        :param ids: Numbers from 0 to 255.
        :return: The text.
        """
        return bytes(int(value) for value in ids).decode("utf-8", errors="replace")


class CharacterTokenizer:
    """A token for each character of a vocabulary.

    :param characters: The vocabulary; each character's number is its place.
    :raises ConfigError: if there is none, or one is there twice.
    """

    def __init__(self, characters: str) -> None:
        if not characters:
            raise ConfigError("a vocabulary without characters encodes nothing; give some")
        if len(set(characters)) != len(characters):
            twice = next(one for place, one in enumerate(characters) if one in characters[:place])
            raise ConfigError(f"the character {twice!r} is in the vocabulary twice; give each once")
        self.characters = characters
        self._codes = _codes(characters)
        self._order = np.argsort(self._codes, kind="stable")

    @classmethod
    def from_text(cls, texts: str | Iterable[str]) -> CharacterTokenizer:
        """Make the vocabulary of all characters of a text, sorted; local, and the same wherever the text is.

        :param texts: One or several.
        :return: The tokenizer.
        """
        found: set[str] = set()
        for text in [texts] if isinstance(texts, str) else texts:
            found.update(text)
        return cls("".join(sorted(found)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CharacterTokenizer:
        """Read a tokenizer from a file; local.

        :param path: What :meth:`save` wrote.
        :return: The same tokenizer.
        :raises ConfigError: if there is no such file, or it holds no vocabulary.
        """
        try:
            return cls(json.loads(Path(path).read_text(encoding="utf-8"))["characters"])
        except FileNotFoundError as error:
            raise ConfigError(
                f"there is no vocabulary {str(path)!r}; give what CharacterTokenizer.save wrote"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{str(path)!r} holds no vocabulary ({error}); save it again") from error

    @property
    def vocabulary_size(self) -> int:
        """Number of characters."""
        return len(self.characters)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the vocabulary as JSON; local.

        :param path: Where to.
        """
        Path(path).write_text(json.dumps({"characters": self.characters}) + "\n", encoding="utf-8")

    def encode(self, text: str) -> npt.NDArray[Any]:
        """Return the number of each character.

        :param text: Of characters of the vocabulary.
        :return: Their numbers.
        :raises ConfigError: if a character is not in the vocabulary.
        """
        codes = _codes(text)
        places = np.searchsorted(self._codes, codes, sorter=self._order)
        numbers = self._order[np.minimum(places, len(self._order) - 1)]
        unknown = np.flatnonzero(self._codes[numbers] != codes)
        if len(unknown):
            raise ConfigError(
                f"the character {text[int(unknown[0])]!r} is not in the vocabulary of {self.vocabulary_size} "
                "characters; make it of all texts, validation's among them"
            )
        return numbers

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text.

        :param ids: Numbers of characters.
        :return: The characters.
        """
        return "".join(self.characters[int(value)] for value in ids)


class _Function:
    """A callable as a tokenizer."""

    def __init__(self, encode: Callable[[str], Any], vocabulary_size: int | None = None) -> None:
        self._encode, self.vocabulary_size = encode, vocabulary_size

    def encode(self, text: str) -> Any:
        found = self._encode(text)
        # Objects of the tokenizers library hold their numbers so.
        return getattr(found, "ids", found)


class _Transformers:
    """A tokenizer of Hugging Face's transformers, without the tokens that it puts around a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> Any:
        return self._tokenizer.encode(text, add_special_tokens=False)

    @property
    def vocabulary_size(self) -> int:
        return len(self._tokenizer)


def find_tokenizer(tokenizer: Any, texts: Sequence[str] | None = None) -> Tokenizer:
    """Make what was given a tokenizer.

    :param tokenizer: ``"bytes"``, ``"characters"`` (of the texts), a tokenizer of Hugging Face's transformers or
        tokenizers, any object with ``encode``, or a callable that takes a text.
    :param texts: For ``"characters"``.
    :return: An object with ``encode``.
    :raises ConfigError: if it is none of these.
    """
    if isinstance(tokenizer, ByteTokenizer | CharacterTokenizer | _Function | _Transformers):
        return tokenizer
    if tokenizer == "bytes":
        return ByteTokenizer()
    if tokenizer == "characters" and texts is not None:
        return CharacterTokenizer.from_text(texts)
    if hasattr(tokenizer, "convert_tokens_to_ids"):
        return _Transformers(tokenizer)
    if hasattr(tokenizer, "encode") and not isinstance(tokenizer, str):
        return _Function(tokenizer.encode, vocabulary_size_of(tokenizer))
    if callable(tokenizer):
        return _Function(tokenizer)
    raise ConfigError(
        f'tokenizer {tokenizer!r} is none; give "bytes", "characters", an object with encode, or a function of a text'
    )


def vocabulary_size_of(tokenizer: Any) -> int | None:
    """Return how many tokens a tokenizer has, where it says so.

    :param tokenizer: Any.
    :return: The number, or ``None``.
    """
    if hasattr(tokenizer, "get_vocab_size"):
        return int(tokenizer.get_vocab_size())
    size: int | None = getattr(tokenizer, "vocabulary_size", None)
    return size


def _codes(text: str) -> npt.NDArray[Any]:
    """Return the code point of each character."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
