"""Workarounds of DeepSpeed 0.19."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

__all__ = ["variables_for_import", "without_shared_memory"]


@contextmanager
def variables_for_import(local_rank: str, accelerator: str) -> Iterator[None]:
    """Set in this block what DeepSpeed reads from the environment, and undo what it sets there.

    DeepSpeed 0.19 takes ``LOCAL_RANK`` for the number of its device, reads ``DS_ACCELERATOR`` when it is imported, and
    has no arguments for them:
    https://github.com/deepspeedai/DeepSpeed/blob/master/accelerator/real_accelerator.py.
    """
    kept = dict(os.environ)
    os.environ.update({"LOCAL_RANK": local_rank, "DS_ACCELERATOR": accelerator})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


@contextmanager
def without_shared_memory(operations: MutableMapping[str, Any]) -> Iterator[None]:
    """Keep DeepSpeed in this block from compiling its operation of shared memory for CPUs, which takes a minute.

    DeepSpeed 0.19 compiles it wherever its table says that it can be, and cannot be told otherwise:
    https://github.com/deepspeedai/DeepSpeed/issues/7625.

    :param operations: ``deepspeed.ops.__compatible_ops__``.
    :yield: Nothing.
    """
    name = "deepspeed_shm_comm"
    kept = {key: value for key, value in operations.items() if key == name}
    operations[name] = False
    try:
        yield
    finally:
        del operations[name]
        operations.update(kept)
