"""How ranks on other hosts tell the launcher something: marked lines on standard error, which the launcher takes out.

A message is cut into short lines, since a launcher in between may cut long ones, and packed so that no byte of it can
be taken for something else.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["MarkedLines", "Message", "mark"]

_MARK = b"\x1exffl:"
_LINE_BYTES = 600
_TEXT_CHARACTERS = 60_000
"""Longer texts, such as tracebacks of endless recursion, lose their middle."""
_LABEL = re.compile(rb"^ *\d+: $")
"""What ``srun --label`` puts before each line."""


class Message(NamedTuple):
    """What a rank told."""

    rank: int
    content: dict[str, Any]


def mark(rank: int, content: Mapping[str, Any]) -> list[bytes]:
    """Write a message as marked lines, each short enough to be written to a pipe in one go.

    :param rank: Rank that tells it.
    :param content: What can be written as JSON.
    :return: The lines.
    """
    packed = base64.b64encode(json.dumps(_shortened(content)).encode())
    parts = [packed[at : at + _LINE_BYTES] for at in range(0, len(packed), _LINE_BYTES)]
    return [b"%s%d.%d.%d:%s\n" % (_MARK, rank, at, len(parts), part) for at, part in enumerate(parts)]


class MarkedLines:
    """Takes messages out of a stream of lines in which those of several ranks may alternate."""

    def __init__(self) -> None:
        self._parts: dict[int, list[bytes]] = {}

    def take(self, line: bytes) -> tuple[bytes, Message | None]:
        """Read one line.

        :param line: The line, with its end.
        :return: What of it is no message (a rank may have begun a line without ending it), and the message that is
            complete now, if any.
        """
        before, found, rest = line.partition(_MARK)
        if not found:
            return line, None
        before = b"" if _LABEL.match(before) else before
        if before:
            before += b"\n"
        try:
            place, _, part = rest.rstrip(b"\r\n").partition(b":")
            rank, at, count = (int(number) for number in place.split(b"."))
            parts = self._parts.setdefault(rank, [])
            if at == 0:
                parts.clear()
            parts.append(part)
            if at + 1 < count:
                return before, None
            del self._parts[rank]
            content = json.loads(base64.b64decode(b"".join(parts), validate=True))
            return (before, Message(rank, content)) if isinstance(content, dict) else (line, None)
        except ValueError:  # a script that prints such a thing itself
            return line, None


def _shortened(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _TEXT_CHARACTERS:
        half = _TEXT_CHARACTERS // 2
        return f"{value[:half]}\n... {len(value) - 2 * half} characters are left out ...\n{value[-half:]}"
    if isinstance(value, Mapping):
        return {key: _shortened(inner) for key, inner in value.items()}
    return value
