"""The first samples of each rank are compared, before the first batch of a loader or a stream that all ranks read.

The ranks share out one order of samples, so that each must see the same data in the same order. Data that split
themselves by rank, or are shuffled without a seed, would be dealt out a second time: some samples would be trained
twice and others never, without any other sign.

Nothing is reduced over a process group, since cells may be at different steps here, and one of them may be in a round.
The ranks of a cell meet at the store of their world. The last of them to come leaves what they have read there for the
other cells, looks for them for some seconds, and judges what it finds: a cell that comes later than that finds what the
others have left, so that nothing goes unseen, but the others have gone on. What this costs is some requests to the
store by each rank, once for each loader.

Floating-point numbers are compared by a few rough sums, since processors and numbers of threads compute unlike last
digits; all else bit by bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from xffl.checks import group, shorten
from xffl.distributed.agreement.consistency import ranks_text
from xffl.distributed.failures.world_store import clone_store
from xffl.errors import ConfigError
from xffl.topology import DataPlace
from xffl.training.data.place import Placed, place_of

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["ACROSS_S", "PATIENCE_S", "SAMPLES", "FirstSamples", "Meeting", "digest_of"]

PATIENCE_S = 60.0
"""How long a rank waits for the others of its cell, at most; a third of the session's timeout where that is less."""
ACROSS_S = 5.0
"""How long a cell waits for the others, at most; a tenth of the session's timeout where that is less. Cells that come
together raise the same error; a cell that is in a round cannot come."""
ASKS_EVERY_S = 0.05
"""How often a cell looks for the others meanwhile"""
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
    :param digests: Of each sample, without its floating-point numbers.
    :param floats: Of each sample, the rough sums of its floating-point numbers.
    :param shown: Each sample in a few words, for a message.
    :param bits: Digests of each sample with all of its bits, for a message in which two samples would look alike.
    :param is_random: Whether samples are unlike each time they are read: then nothing is compared.
    :param error: Why nothing could be read.
    """

    at: tuple[int, int] = (0, 0)
    layout: str = ""
    digests: tuple[str, ...] = ()
    floats: tuple[Sequence[Sequence[float]], ...] = ()
    shown: tuple[str, ...] = ()
    bits: tuple[str, ...] = ()
    is_random: bool = False
    error: str | None = None

    @classmethod
    def of(cls, samples: Sequence[Any], at: tuple[int, int], layout: str = "") -> FirstSamples:
        """Take the first of some samples."""
        first = samples[:SAMPLES]
        rough = [_Digest(one, are_floats_apart=True) for one in first]
        return cls(
            at=at,
            layout=layout,
            digests=tuple(one.text for one in rough),
            floats=tuple(one.floats for one in rough),
            shown=tuple(map(show, first)),
            bits=tuple(map(digest_of, first)),
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FirstSamples:
        """Make it again of what went through JSON, which has lists in place of tuples."""
        names = ("at", "digests", "floats", "shown", "bits")
        return cls(**{**values, **{name: tuple(values[name]) for name in names}})

    def has(self, index: int, other: FirstSamples) -> bool:
        """Say whether both have the same sample at this place, but for what processors compute otherwise."""
        if index >= len(self.digests) or index >= len(other.digests):
            return len(self.digests) == len(other.digests)
        if self.digests[index] != other.digests[index]:
            return False
        return all(map(_are_near, self.floats[index], other.floats[index]))


class Meeting:
    """The ranks that must read alike, at the store of their world.

    :param state: The state of this process. A place without a process group meets nobody.
    :param what: What is read, the same on all ranks, such as the class of the dataset.
    :param over_cells: Whether all cells of this job read the same; else the ranks of a cell do.
    :param advice: What to write where ranks differ.
    :param kind: What tells loaders apart, such as the part and the batch size: cells compare those of one kind, each
        with the one that was made as so many-th of that kind.
    :param length: Samples of the dataset, where they are known. It tells loaders apart, too, except that data which
        were split by rank have a sample more on some ranks.
    """

    def __init__(
        self,
        state: Placed | DataPlace,
        what: str,
        *,
        over_cells: bool,
        advice: str,
        kind: str = "",
        length: int | None = None,
    ) -> None:
        self._what = what
        self._advice = advice
        self._rank = self._cell = 0
        self._offsets: tuple[int, ...] = (0, 1)
        # A world that only looks like one (torch's fake group) has no store.
        if not isinstance(state, DataPlace) and dist.is_initialized() and dist.get_backend() != "fake":
            at = place_of(state).in_job
            self._rank = at.rank
            self._cell = at.cell
            self._offsets = at.topology.offsets
        self._cells = range(len(self._offsets) - 1) if over_cells else range(self._cell, self._cell + 1)
        timeouts = getattr(state, "timeouts", None)
        self._timeout_s = float("inf") if timeouts is None else timeouts.session_s
        self._kind = kind
        self._length = length
        # Loaders that are alike are told apart by the order in which they were made, since cells may iterate over them
        # in another one.
        self._setup_number = getattr(state, "setup_number", 0)  # sessions of one world may follow each other
        made = getattr(state, "meetings", None)
        self._made: Counter[str] = Counter() if made is None else made
        self._number = self._made[self._name(length)]
        self._made[self._name(length)] += 1

    @property
    def is_needed(self) -> bool:
        """Whether there are others to compare with."""
        return sum(len(self._ranks(cell)) for cell in self._cells) > 1

    def compare(self, own: FirstSamples) -> None:
        """Compare what each rank has read; every rank that must read alike calls this once.

        A rank waits for those of its cell, a minute at most, and its cell for the others, some seconds at most.

        :param own: What this rank has read.
        :raises ConfigError: if they differ, or a rank could not read; on all of them, or, where cells came so late that
            others had gone on, on those that came late.
        """
        store = clone_store("give is_compared=False")
        ranks = self._ranks(self._cell)
        patience_s = min(PATIENCE_S, self._timeout_s / 3)
        name = f"xffl_first/{_hashed(f'{self._what} {ranks}')}"
        prefix = f"{name}/{store.add(f'{name}/{self._rank}', 1)}"  # those that are alike meet one after the other
        store.set(f"{prefix}/{self._rank}", json.dumps([self._number, self._length, asdict(own)]))
        if store.add(f"{prefix}/count", 1) == len(ranks):
            store.set(f"{prefix}/all_came", "")
            store.set(f"{prefix}/verdict", json.dumps(self._judge(store, prefix)))
        try:
            store.wait([f"{prefix}/all_came"], timedelta(seconds=patience_s))
            store.wait([f"{prefix}/verdict"], timedelta(seconds=patience_s))
        except RuntimeError:
            if self._rank == ranks[0]:
                warnings.warn(
                    f"rank {self._rank} has waited for {patience_s:g} s for all of {ranks_text(ranks)} to read "
                    f"their first samples of {self._what}, and goes on: whether they read the same is not known",
                    stacklevel=3,
                )
            return
        verdict, judged = json.loads(store.get(f"{prefix}/verdict").decode())
        if store.add(f"{prefix}/read", 1) == len(ranks):
            store.set(f"{prefix}/all_read", "")
        if not verdict:
            return
        if self._rank == 0:  # the store may live in this process, which must not end before all ranks have read
            with suppress(RuntimeError):
                store.wait([f"{one}/all_read" for one in judged], timedelta(seconds=patience_s))
        raise ConfigError(verdict)

    def _ranks(self, cell: int) -> range:
        return range(self._offsets[cell], self._offsets[cell + 1])

    def _name(self, length: int | None) -> str:
        """Return under what name cells find those of the same kind."""
        return f"{self._setup_number} {self._what} {self._kind} {length} {self._offsets} {self._cells}"

    def _judge(self, store: Store, prefix: str) -> tuple[str, list[str]]:
        """Return what is wrong with what was read, or nothing, and the prefixes of those whose ranks it concerns.

        Called on the last rank of a cell to come.
        """
        records = {rank: json.loads(store.get(f"{prefix}/{rank}").decode()) for rank in self._ranks(self._cell)}
        samples = {rank: FirstSamples.from_json(values) for rank, (_, _, values) in records.items()}
        if len(self._cells) == 1:
            return difference(samples, self._what, self._advice), [prefix]
        # Where ranks of the cell are unlike, all cells take what their first rank says.
        number, length, _ = records[self._ranks(self._cell)[0]]
        at = self._table(length, number)
        of_ranks = {rank: values for rank, (_, _, values) in records.items()}
        store.set(f"{at}/{self._cell}", json.dumps([prefix, of_ranks]))
        near = [] if length is None else [length - 1, length + 1]
        tables = [at, *(self._table(one, number) for one in near if self._name(one) not in self._made)]
        wait_s = min(ACROSS_S, self._timeout_s / 10, PATIENCE_S)
        deadline = time.monotonic() + wait_s
        # That others do not come is nothing unusual, but torch prints lines where a wait at the store runs out.
        while len(arrived := self._find_others(store, tables)) < len(self._cells) - 1:
            if time.monotonic() >= deadline:
                store.set(f"{at}/{self._cell}/goes_on", "")
                arrived = self._find_others(store, tables)  # who comes from now on sees that this cell has gone on
                break
            time.sleep(ASKS_EVERY_S)
        judged, late = [prefix], []
        for cell, key in arrived.items():
            theirs, values = json.loads(store.get(key).decode())
            samples.update((int(rank), FirstSamples.from_json(one)) for rank, one in values.items())
            judged.append(theirs)
            if store.check([f"{key}/goes_on"]):
                late.append(cell)
        text = difference(dict(sorted(samples.items())), self._what, self._advice)
        if text and late:
            cells = ranks_text(late).replace("rank", "cell")
            text += (
                f". Not all ranks raise this: {cells} came first, waited for {wait_s:g} s for the other cells, and "
                "went on to train"
            )
        return text, judged

    def _find_others(self, store: Store, tables: Sequence[str]) -> dict[int, str]:
        """Return where other cells have left what they have read, as far as they have."""
        others: dict[int, str] = {}
        for cell in self._cells:
            keys = [f"{table}/{cell}" for table in tables if cell != self._cell]
            key = next((key for key in keys if store.check([key])), None)
            if key is not None:
                others[cell] = key
        return others

    def _table(self, length: int | None, number: int) -> str:
        return f"xffl_first/{_hashed(f'{self._name(length)} {number}')}"


def difference(of_ranks: Mapping[int, FirstSamples], what: str, advice: str) -> str:
    """Return the text that says how ranks have read unlike samples; empty where they have not."""
    failed = group((samples.error, rank) for rank, samples in of_ranks.items() if samples.error is not None)
    if failed:
        texts = [f"{ranks_text(ranks)}: {error}" for error, ranks in list(failed.items())[:4]]
        return f"not all ranks could read their first samples of {what}: {'; '.join(texts)}"
    for at in dict.fromkeys(samples.at for samples in of_ranks.values()):
        here = {rank: samples for rank, samples in of_ranks.items() if samples.at == at}
        by_layout = group((samples.layout, rank) for rank, samples in here.items())
        if len(by_layout) > 1:
            texts = [f"{layout} on {ranks_text(ranks)}" for layout, ranks in list(by_layout.items())[:4]]
        elif any(samples.is_random for samples in here.values()):
            continue
        else:
            texts = _unlike(here)
        if texts:
            return f"the ranks do not read the same data from {what}: {'; '.join(texts)}. {advice}"
    return ""


def _unlike(samples: Mapping[int, FirstSamples]) -> list[str]:
    """Return what ranks have at the first place where not all have the same sample; empty where there is none."""
    for index in range(max(len(one.digests) for one in samples.values())):
        groups: list[list[int]] = []
        for rank, one in samples.items():
            # Not by a rounded value: two that are near each other may lie on both sides of an edge.
            alike = next((ranks for ranks in groups if samples[ranks[0]].has(index, one)), None)
            if alike is None:
                groups.append([rank])
            else:
                alike.append(rank)
        if len(groups) == 1:
            continue
        firsts = [samples[ranks[0]] for ranks in groups]
        shown = [one.shown[index] if index < len(one.shown) else "no sample" for one in firsts]
        if len(set(shown)) < len(shown):
            shown = [
                f"{text} (digest {one.bits[index]})" if index < len(one.bits) else text
                for text, one in zip(shown, firsts, strict=True)
            ]
        verbs = ("begins with", "begin with") if not index else (f"has as sample {index}", f"have as sample {index}")
        named = list(zip(groups, shown, strict=True))[:4]
        return [f"{ranks_text(ranks)} {verbs[len(ranks) > 1]} {text}" for ranks, text in named]
    return []


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Digests --------------------------------------------------------------------------------------------------------------


ROUGH = 1e-3
"""By how much rough sums may differ, relative to the numbers: processors' last digits do by far less"""
NOISE = 1e-6
"""What may be left of numbers that cancel out"""
SUMMED = 65536
"""How many numbers of an array are summed up, at most"""
WAVES = (0.7, 1.9, 2.6, 3.1)
"""Weights of the rough sums are the cosines of an element's place times these."""


def digest_of(sample: Any) -> str:
    """Return a digest of a sample's values; objects that hold none that are known count by their class alone."""
    return _Digest(sample, are_floats_apart=False).text


class _Digest:
    """What a sample holds: what kind each value is, then its bits.

    :param sample: The sample.
    :param are_floats_apart: Whether floating-point numbers are summed up in :attr:`floats` and not in the digest.
    """

    def __init__(self, sample: Any, *, are_floats_apart: bool) -> None:
        self.floats: list[list[float]] = []
        """Of each array or number: tolerance, mean square's root, share that is not finite, weighted sums"""
        self._are_floats_apart = are_floats_apart
        self._hashed = hashlib.blake2b(digest_size=8)
        self._add(sample, DEPTH)

    @property
    def text(self) -> str:
        """The digest."""
        return self._hashed.hexdigest()

    def _add(self, value: Any, depth: int) -> None:
        self._hashed.update(f"{type(value).__qualname__}:".encode())
        if value is None or not depth:
            return
        if self._are_floats_apart and isinstance(value, float | complex):
            self._add_floats(np.asarray(value), float(np.finfo(np.float64).eps))
        elif isinstance(value, bool | int | complex):
            self._hashed.update(repr(value).encode())
        elif isinstance(value, float):
            self._hashed.update(struct.pack("<d", value))
        elif isinstance(value, str):
            self._hashed.update(value.encode(errors="surrogatepass"))
        elif isinstance(value, bytes | bytearray | memoryview):
            self._hashed.update(bytes(value))
        elif isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, np.ndarray | np.generic):
            self._add_array(np.asarray(value), depth)
        elif isinstance(value, Mapping):
            # Names in underscores tell where a sample was read (webdataset's __url__), which may differ between nodes.
            kept = {repr(key): item for key, item in value.items() if not str(key).startswith("__")}
            for key in sorted(kept):
                self._hashed.update(key.encode(errors="surrogatepass"))
                self._add(kept[key], depth - 1)
        elif isinstance(value, Sequence):
            self._add_all(value, depth)
        elif isinstance(value, set | frozenset):
            floats = sorted(item for item in value if isinstance(item, float)) if self._are_floats_apart else []
            self._add_all(floats, depth)
            others = (digest_of(item) for item in value if not (self._are_floats_apart and isinstance(item, float)))
            self._hashed.update("".join(sorted(others)).encode())
        elif is_dataclass(value):
            for field in fields(value):
                self._add(getattr(value, field.name), depth - 1)
        elif isinstance(value, os.PathLike):
            self._hashed.update(os.fsencode(value))
        elif callable(getattr(value, "tobytes", None)):  # an image of PIL
            self._hashed.update(f"{getattr(value, 'mode', '')} {getattr(value, 'size', '')}".encode())
            self._hashed.update(value.tobytes())

    def _add_all(self, values: Sequence[Any], depth: int) -> None:
        self._hashed.update(f"{len(values)}".encode())
        for item in values:
            self._add(item, depth - 1)

    def _add_tensor(self, value: torch.Tensor) -> None:
        self._hashed.update(f"{value.dtype} {tuple(value.shape)}".encode())
        if value.layout != torch.strided or value.is_meta or type(value) not in (torch.Tensor, torch.nn.Parameter):
            return
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if self._are_floats_apart and (plain.is_floating_point() or plain.is_complex()):
            wide = plain.to(torch.complex128 if plain.is_complex() else torch.float64)
            self._add_floats(wide.numpy(), torch.finfo(value.dtype).eps)
        else:
            self._hashed.update(plain.view(torch.uint8).numpy().tobytes())

    def _add_array(self, value: np.ndarray[Any, Any], depth: int) -> None:
        self._hashed.update(f"{value.dtype} {value.shape}".encode())
        if value.dtype.hasobject:
            for item in value.reshape(-1).tolist():
                self._add(item, depth - 1)
        elif self._are_floats_apart and value.dtype.kind in "fc":
            self._add_floats(value, float(np.finfo(value.dtype).eps))
        else:
            self._hashed.update(value.tobytes())

    def _add_floats(self, values: np.ndarray[Any, Any], step: float) -> None:
        """Add the rough sums of some numbers; ``step`` is the distance of two numbers of their type next to 1."""
        flat = values.reshape(-1)
        if not flat.size:
            return
        if flat.dtype.kind == "c":
            flat = np.concatenate([flat.real, flat.imag])
        flat = flat[:: -(-flat.size // SUMMED)].astype(np.float64)
        is_finite = np.isfinite(flat)
        flat = np.where(is_finite, flat, 0.0)
        largest = float(np.abs(flat).max()) or 1.0
        scaled = flat / largest  # so that no square is infinite
        places = np.arange(1, len(flat) + 1)
        sums = [float(scaled @ np.cos(wave * places)) / len(flat) ** 0.5 * largest for wave in WAVES]
        mean = float(np.mean(scaled * scaled)) ** 0.5 * largest
        self.floats.append([max(ROUGH, 8 * step), mean, 1.0 - float(is_finite.mean()), *sums])


def _are_near(one: Sequence[float], other: Sequence[float]) -> bool:
    """Say whether the rough sums of two arrays of one shape and type are those of the same numbers."""
    tolerance = one[0] * max(one[1], other[1]) + NOISE
    apart = abs(one[2] - other[2])
    return apart <= ROUGH and _all_near(one[3:], other[3:], tolerance) and abs(one[1] - other[1]) <= tolerance


def _all_near(ones: Iterable[float], others: Iterable[float], tolerance: float) -> bool:
    return all(abs(one - other) <= tolerance for one, other in zip(ones, others, strict=True))


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
