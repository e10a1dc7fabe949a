"""The variables of this process as they are now, also after a library has replaced ``os.environ``.

Hugging Face's datasets puts a copy in the place of ``os.environ`` when ``Dataset.map`` or ``filter`` is called with
``num_proc`` (seen with 5.2; https://github.com/huggingface/datasets/blob/5.2.0/src/datasets/arrow_dataset.py,
``os.environ = prev_env``). What was bound to the object before, such as the default of an argument, keeps the variables
of that time, and is not changed by what a script sets later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping

__all__ = ["ENVIRON"]


class _Environ(MutableMapping[str, str]):
    """Reads and changes what ``os.environ`` is at the time of each call."""

    def __getitem__(self, name: str) -> str:
        return os.environ[name]

    def __setitem__(self, name: str, text: str) -> None:
        os.environ[name] = text

    def __delitem__(self, name: str) -> None:
        del os.environ[name]

    def __iter__(self) -> Iterator[str]:
        return iter(os.environ)

    def __len__(self) -> int:
        return len(os.environ)

    def __repr__(self) -> str:
        return repr(os.environ)


ENVIRON: MutableMapping[str, str] = _Environ()
"""The variables of this process; functions that read variables take it where the caller gives no others."""
