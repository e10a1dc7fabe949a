"""Files that ``torch.save`` has written, read so that nothing of them is run and none makes more memory than it has.

``torch.load(weights_only=True)`` makes tensors and plain values only. It still believes what the file says of itself:
archives may be compressed a thousandfold, an array of bytes may claim any length, and a tensor may repeat one element
without end. What xffl writes does none of this, so such files are refused, before or after they are loaded.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch

from xffl.checkpoint.pickles import MOST_DEPTH, check_pickle

__all__ = ["FileSlice", "check_archive", "load_archive"]

MOST_BYTES = 1 << 40
"""Bytes of an archive that is read, where its reader gives no limit"""


class FileSlice(io.RawIOBase):
    """Bytes of a file as a file of their own, read where they lie."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        self._stream = stream
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        """Tell that it can be read."""
        return True

    def seekable(self) -> bool:
        """Tell that it can be read from anywhere."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, counted from the start, from here or from the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"place {base + offset} is before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Return the place."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read from the place on."""
        self._stream.seek(self._start + self._at)
        data = self._stream.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def load_archive(source: BinaryIO | bytes, *, limit: int = MOST_BYTES) -> Any:
    """Return what ``torch.save`` has written, on the CPU; local.

    :param source: The file, from its start to its end, or its bytes.
    :param limit: Bytes of the archive, at most.
    :return: Tensors and plain values.
    :raises ValueError: if it is no such archive, or claims more than it has; the text says what is wrong.
    """
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    check_archive(stream, limit=limit)
    stream.seek(0)
    try:
        content = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        # Without torch's own text, which advises to run what the file holds.
        raise ValueError(f"it holds something else than tensors and plain values ({type(error).__name__})") from error
    _Values().check(content)
    return content


def check_archive(stream: BinaryIO | io.RawIOBase, *, limit: int = MOST_BYTES) -> None:
    """Refuse what is no archive of ``torch.save``, or would take more memory than it has bytes; local.

    :param stream: The archive, from its start to its end; its position changes.
    :param limit: Its bytes, at most.
    :raises ValueError: if it is refused; the text says why.
    """
    size = stream.seek(0, io.SEEK_END)
    if size > limit:
        raise ValueError(f"it has {size} bytes, and {limit} are read at most")
    try:
        with zipfile.ZipFile(stream) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise ValueError("its archive is compressed, which torch.save never does")
            if sum(entry.file_size for entry in entries) > size:
                raise ValueError("its archive says that it holds more bytes than it has")
            pickles = [entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"]
            if len(pickles) != 1:
                raise ValueError(f"its archive has {len(pickles)} entries data.pkl in place of one")
            if len({entry.filename for entry in entries}) != len(entries):
                raise ValueError("its archive has two entries of one name")
            memory = pickles[0].filename.removesuffix("data.pkl") + "data/"
            records = {
                entry.filename.removeprefix(memory): entry.file_size
                for entry in entries
                if entry.filename.startswith(memory)
            }
            check_pickle(archive.read(pickles[0]), records)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"it is no archive of torch.save ({type(error).__name__})") from error


SMALL_BYTES = 1 << 26
"""Bytes of a tensor that may repeat elements of less memory, as an expanded one does"""


def _check_tensor(tensor: torch.Tensor) -> None:
    """Refuse a tensor with far more elements than its memory has, whose first copy would take any amount."""
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ValueError(f"it holds a tensor that is {tensor.layout} on {tensor.device}; dense ones are kept")
    size = tensor.numel() * tensor.element_size()
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if is_plain and size > max(SMALL_BYTES, tensor.untyped_storage().nbytes()):
        raise ValueError(f"it holds a tensor of {size} bytes in {tensor.untyped_storage().nbytes()} bytes of memory")


SMALL_COUNT = 1 << 20
"""Values that any archive may have, each counted as often as it occurs"""
OCCURRENCES = 16
"""How often each occurs in a larger one, on average at most"""


class _Values:
    """What is nested in what was loaded: lists and mappings, each looked through once, wherever it occurs again."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, int]] = {}
        self._open: set[int] = set()
        self._looked_at = 0

    def check(self, content: Any) -> None:
        """Refuse a tensor that has less memory than elements, and values that go on without end where they are read."""
        size, _ = self._size(content, 0)
        if size > SMALL_COUNT + OCCURRENCES * self._looked_at:
            raise ValueError(f"it repeats {self._looked_at} values far more often than any state does")

    def _size(self, one: Any, above: int) -> tuple[int, int]:
        """Return how many values one has, each counted as often as it occurs, and how deep they are nested."""
        if isinstance(one, torch.Tensor):
            _check_tensor(one)
        if not isinstance(one, (list, tuple, set, frozenset, Mapping)):
            return 1, 0
        if (known := self._sizes.get(id(one))) is not None:
            return known
        if id(one) in self._open:
            raise ValueError("one of its values holds itself")
        self._open.add(id(one))
        size, depth = 1, 0
        for inner in (*one, *one.values()) if isinstance(one, Mapping) else one:
            self._looked_at += 1
            inner_size, inner_depth = self._size(inner, above + 1) if above < MOST_DEPTH else (1, MOST_DEPTH)
            size += inner_size
            depth = max(depth, 1 + inner_depth)
            if depth > MOST_DEPTH:
                raise ValueError(f"its values are nested more than {MOST_DEPTH} deep")
        self._open.remove(id(one))
        self._sizes[id(one)] = size, depth
        return size, depth
