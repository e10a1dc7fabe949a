"""The first samples of each rank are compared, before the first batch of a loader or a stream that all ranks read.

The ranks share out one order of samples, so that each must see the same data in the same order. Data that split
themselves by rank, or are shuffled without a seed, would be dealt out a second time: some samples would be trained
twice and others never, without any other sign.

Nothing is reduced over a process group, since cells may be at different steps here, and one of them may be in a round.
The ranks meet at the store of their world, and none waits for longer than :data:`PATIENCE_S`. What this costs is some
requests to the store by each rank, once for each loader.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from xffl.checks import group, shorten
from xffl.distributed.consistency import clone_store, ranks_text
from xffl.errors import ConfigError
from xffl.topology import DataPlace
from xffl.training.data.place import Placed, place_of

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["PATIENCE_S", "SAMPLES", "FirstSamples", "Meeting", "digest_of"]

PATIENCE_S = 60.0
"""How long a rank waits for the others' first samples before it goes on: a cell that is in a round cannot come."""
SAMPLES = 16
"""How many samples are compared, at most"""
DEPTH = 8
"""How deep containers in a sample are looked into"""
SHOWN = 60
"""Characters of a sample in a message"""


@dataclass(frozen=True)
class FirstSamples:
    """What a rank has read first.

    :param at: Epoch and step; ranks that have gone on from unlike positions have nothing to compare.
    :param layout: What else must be the same on all ranks, such as the number of samples.
    :param digests: Of the samples.
    :param shown: The first of them, for a message.
    :param is_random: Whether samples are unlike each time they are read: then nothing is compared.
    :param error: Why nothing could be read.
    """

    at: tuple[int, int] = (0, 0)
    layout: str = ""
    digests: tuple[str, ...] = ()
    shown: str = "no sample"
    is_random: bool = False
    error: str | None = None

    @classmethod
    def of(cls, samples: Sequence[Any], at: tuple[int, int], layout: str = "") -> FirstSamples:
        """Take the first of some samples."""
        digests = tuple(digest_of(sample) for sample in samples[:SAMPLES])
        return cls(at, layout, digests, show(samples[0]) if samples else "no sample")


class Meeting:
    """The ranks that must read alike, at the store of their world.

    :param state: The state of this process. A place without a process group meets nobody.
    :param what: What is read, the same on all ranks, such as the class of the dataset and its identity.
    :param over_cells: Whether all cells of this job read the same; else the ranks of a cell do.
    :param advice: What to write where ranks differ.
    """

    def __init__(self, state: Placed | DataPlace, what: str, *, over_cells: bool, advice: str) -> None:
        self._what, self._advice = what, advice
        self._rank, self._ranks, self._cells = 0, range(1), (0,)
        # A world that only looks like one (torch's fake group) has no store.
        if not isinstance(state, DataPlace) and dist.is_initialized() and dist.get_backend() != "fake":
            at = place_of(state).in_job
            offsets = at.topology.offsets
            self._rank, self._cells = at.rank, offsets[:-1]
            self._ranks = range(offsets[-1]) if over_cells else range(offsets[at.cell], offsets[at.cell + 1])

    @property
    def is_needed(self) -> bool:
        """Whether there are others to compare with."""
        return len(self._ranks) > 1

    def compare(self, own: FirstSamples) -> None:
        """Compare what each rank has read; every rank that must read alike calls this once, and waits for the others.

        :param own: What this rank has read.
        :raises ConfigError: if they differ, or a rank could not read; on all of them.
        """
        store = clone_store("give is_compared=False")
        name = hashlib.sha256(f"{self._what} {self._ranks}".encode()).hexdigest()[:16]
        number = store.add(f"xffl_first/{name}/{self._rank}", 1)  # loaders that are alike meet one after the other
        prefix = f"xffl_first/{name}/{number}"
        store.set(f"{prefix}/{self._rank}", json.dumps(asdict(own)))
        if store.add(f"{prefix}/count", 1) == len(self._ranks):
            store.set(f"{prefix}/verdict", self._judge(store, prefix))
        try:
            store.wait([f"{prefix}/verdict"], timedelta(seconds=PATIENCE_S))
        except RuntimeError:
            if self._rank in self._cells:
                warnings.warn(
                    f"rank {self._rank} has waited for {PATIENCE_S:g} s for all of {ranks_text(self._ranks)} to read "
                    f"their first samples of {self._what}, and goes on: whether they read the same is not known",
                    stacklevel=3,
                )
            return
        verdict = store.get(f"{prefix}/verdict").decode()
        if not verdict:
            return
        if store.add(f"{prefix}/read", 1) == len(self._ranks):
            store.set(f"{prefix}/all_read", "")
        if self._rank == 0:  # the store may live in this process, which must not end before all ranks have read
            with suppress(RuntimeError):
                store.wait([f"{prefix}/all_read"], timedelta(seconds=PATIENCE_S))
        raise ConfigError(verdict)

    def _judge(self, store: Store, prefix: str) -> str:
        """Return what is wrong with what the ranks have read, or nothing."""
        told: dict[int, FirstSamples] = {}
        for rank in self._ranks:
            values = json.loads(store.get(f"{prefix}/{rank}").decode())
            told[rank] = FirstSamples(**{**values, "at": tuple(values["at"]), "digests": tuple(values["digests"])})
        return difference(told, self._what, self._advice)


def difference(told: Mapping[int, FirstSamples], what: str, advice: str) -> str:
    """Return the text that says how ranks have read unlike samples; empty where they have not."""
    failed = group((one.error, rank) for rank, one in told.items() if one.error is not None)
    if failed:
        texts = [f"{ranks_text(ranks)}: {error}" for error, ranks in list(failed.items())[:4]]
        return f"not all ranks could read their first samples of {what}: {'; '.join(texts)}"
    for at in dict.fromkeys(one.at for one in told.values()):
        here = {rank: one for rank, one in told.items() if one.at == at}
        by_layout = group((one.layout, rank) for rank, one in here.items())
        is_random = any(one.is_random for one in here.values())
        by_digest = group(((), rank) if is_random else (one.digests, rank) for rank, one in here.items())
        if len(by_layout) > 1:
            texts = [f"{layout} on {ranks_text(ranks)}" for layout, ranks in list(by_layout.items())[:4]]
        elif len(by_digest) > 1:
            texts = [
                f"{ranks_text(ranks)} {'begins' if len(ranks) == 1 else 'begin'} with {here[ranks[0]].shown}"
                for ranks in list(by_digest.values())[:4]
            ]
        else:
            continue
        return f"the ranks do not read the same data from {what}: {'; '.join(texts)}. {advice}"
    return ""


# Digests --------------------------------------------------------------------------------------------------------------


def digest_of(sample: Any) -> str:
    """Return a digest of a sample's values; objects that hold none that are known count by their class alone."""
    hashed = hashlib.blake2b(digest_size=8)
    _add(hashed, sample, DEPTH)
    return hashed.hexdigest()


def _add(hashed: Any, value: Any, depth: int) -> None:
    """Add a value to a digest: what kind it is, then what it holds."""
    hashed.update(f"{type(value).__qualname__}:".encode())
    if value is None or not depth:
        return
    if isinstance(value, bool | int | complex):
        hashed.update(repr(value).encode())
    elif isinstance(value, float):
        hashed.update(struct.pack("<d", value))
    elif isinstance(value, str):
        hashed.update(value.encode(errors="surrogatepass"))
    elif isinstance(value, bytes | bytearray | memoryview):
        hashed.update(bytes(value))
    elif isinstance(value, torch.Tensor):
        _add_tensor(hashed, value)
    elif isinstance(value, np.ndarray | np.generic):
        _add_array(hashed, np.asarray(value), depth)
    elif isinstance(value, Mapping):
        # Names in underscores tell where a sample was read (webdataset's __url__), which may differ between nodes.
        kept = {repr(key): one for key, one in value.items() if not str(key).startswith("__")}
        for key in sorted(kept):
            hashed.update(key.encode(errors="surrogatepass"))
            _add(hashed, kept[key], depth - 1)
    elif isinstance(value, Sequence):
        hashed.update(f"{len(value)}".encode())
        for one in value:
            _add(hashed, one, depth - 1)
    elif isinstance(value, set | frozenset):
        hashed.update("".join(sorted(map(digest_of, value))).encode())
    elif is_dataclass(value):
        for field in fields(value):
            _add(hashed, getattr(value, field.name), depth - 1)
    elif isinstance(value, os.PathLike):
        hashed.update(os.fsencode(value))
    elif callable(getattr(value, "tobytes", None)):  # an image of PIL
        hashed.update(f"{getattr(value, 'mode', '')} {getattr(value, 'size', '')}".encode())
        hashed.update(value.tobytes())


def _add_tensor(hashed: Any, value: torch.Tensor) -> None:
    hashed.update(f"{value.dtype} {tuple(value.shape)}".encode())
    if value.layout == torch.strided and not value.is_meta and type(value) in (torch.Tensor, torch.nn.Parameter):
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        hashed.update(plain.view(torch.uint8).numpy().tobytes())


def _add_array(hashed: Any, value: np.ndarray[Any, Any], depth: int) -> None:
    hashed.update(f"{value.dtype} {value.shape}".encode())
    if value.dtype.hasobject:
        for one in value.reshape(-1).tolist():
            _add(hashed, one, depth - 1)
    else:
        hashed.update(value.tobytes())


def show(sample: Any) -> str:
    """Return a sample in a few words: a number or text itself, else its kind and a digest."""
    if isinstance(sample, torch.Tensor | np.generic | np.ndarray) and not tuple(sample.shape):
        sample = sample.item()
    if isinstance(sample, bool | int | float | str | bytes):
        text = repr(sample)
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    if isinstance(sample, list | tuple) and sample:
        return f"({shorten([show(one) for one in sample], 3)})"
    return f"a {type(sample).__name__} with digest {digest_of(sample)}"
