"""Text that comes in pieces, cut where a line ends."""

from __future__ import annotations

__all__ = ["LineCutter"]

_LONGEST_BYTES = 1 << 16


class LineCutter:
    """Cuts at each newline, and at each carriage return, with which a progress bar begins anew.

    What has no end is kept until it has one or is 64 KiB long, so that an endless line costs neither memory nor time.
    """

    def __init__(self) -> None:
        self._rest = b""

    def add(self, piece: bytes) -> list[bytes]:
        """Take the next piece.

        :param piece: Any bytes.
        :return: The lines that are complete now, with their ends, and what is too long to be kept.
        """
        lines = (self._rest + piece).splitlines(keepends=True)  # of bytes: at \n, \r and \r\n alone
        # A carriage return that comes last may be half of the end of a line.
        self._rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if len(self._rest) > _LONGEST_BYTES:
            lines.append(self.take_rest())
        return lines

    def take_rest(self) -> bytes:
        """Return what has no end yet, and forget it.

        :return: The bytes, if any.
        """
        rest, self._rest = self._rest, b""
        return rest
