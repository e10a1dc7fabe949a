"""Files that ``torch.save`` has written, read so that nothing of them is run and none makes more memory than it has.

``torch.load(weights_only=True)`` makes tensors and plain values only. It still believes what the file says of itself:
archives may be compressed a thousandfold, an array of bytes may claim any length, and a tensor may repeat one element
without end. What xffl writes does none of this, so such files are refused, before or after they are loaded.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch

__all__ = ["FileSlice", "check_archive", "load_archive"]

MOST_BYTES = 1 << 40
"""Bytes of an archive that is read, where its reader gives no limit"""
GROWING = ("bytearray",)
"""What a pickle may call that takes memory without having it in the file, and that xffl never writes"""


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
    for tensor in _tensors_in(content):
        _check_tensor(tensor)
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
            _check_pickle(archive.read(pickles[0]))
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"it is no archive of torch.save ({type(error).__name__})") from error


def _check_pickle(data: bytes) -> None:
    """Refuse a pickle that calls what takes memory of its own, or is none."""
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in ("GLOBAL", "INST") and str(argument).split(" ")[-1] in GROWING:
                raise pickle.UnpicklingError(f"it would call {argument}")
            # By this one a name would come from the stack, where it is not seen; torch.save writes the older form.
            if opcode.name == "STACK_GLOBAL":
                raise pickle.UnpicklingError("it looks names up by STACK_GLOBAL")
    except pickle.UnpicklingError as error:
        raise ValueError(f"its pickle is none that torch.save writes of tensors: {error}") from error


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


MOST_DEPTH = 200
"""How deep what is read may be nested"""


def _tensors_in(content: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested lists and mappings, each list and mapping once, wherever it occurs again."""
    seen: set[int] = set()
    level = [content]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for one in level:
            if isinstance(one, torch.Tensor):
                yield one
            elif isinstance(one, (list, tuple, set, frozenset, Mapping)) and id(one) not in seen:
                seen.add(id(one))
                below.extend(one)
                if isinstance(one, Mapping):
                    below.extend(one.values())
        if not below:
            return
        level = below
    raise ValueError(f"its values are nested more than {MOST_DEPTH} deep")
