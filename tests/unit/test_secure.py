"""Secure sums: exact in fixed point, silent about each row, and never twice under one mask."""

from __future__ import annotations

import copy
import hashlib
import hmac
import itertools
import math
import pickle
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worlds import WorldError, run_world
from xffl.aggregation import privacy as secure
from xffl.aggregation.privacy import CHUNK, KeyPair, Keystream, Masker, SecureSum, make_masker
from xffl.errors import ConfigError, RoundError, StateError
from xffl.topology import Topology

x25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.x25519")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
PLACE = ("lane", 0, -1)


def maskers(cells: int, fraction_bits: int = 32, ranks_of_cell: int = 1) -> list[Masker]:
    """Return the masks of all ranks of a world in one process."""
    topology = Topology(cells * ranks_of_cell, ranks_of_cell)
    keys = [KeyPair() for _ in range(topology.world_size)]
    publics = [pair.public for pair in keys]
    options = SecureSum(fraction_bits)
    return [
        Masker(options, rank, pair, publics=publics, topology=topology, context="plan")
        for rank, pair in enumerate(keys)
    ]


def begun(cells: int, fraction_bits: int = 32, present: Sequence[int] | None = None) -> list[Masker]:
    ranks = maskers(cells, fraction_bits)
    for masker in ranks:
        masker.start_attempt(1, range(cells) if present is None else present)
    return ranks


def rows_of(
    ranks: Sequence[Masker],
    values: Mapping[int, torch.Tensor],
    shares: Mapping[int, float] | None = None,
    place: tuple[object, ...] = PLACE,
) -> dict[int, torch.Tensor]:
    """Mask the values of each contributing cell, where cells are ranks."""
    rows = {cell: torch.empty(value.numel(), dtype=torch.int64) for cell, value in values.items()}
    senders = {cell: cell for cell in values}
    for cell, value in values.items():
        share = 1.0 / len(values) if shares is None else shares[cell]
        ranks[cell].encode(value, share, rows[cell], place=place, senders=senders)
    return rows


def drawn(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wrapped(number: int) -> int:
    """Return a number as 64 bits hold it."""
    return (number + 2**63) % 2**64 - 2**63


# The sum --------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.integers(3, 6).flatmap(
        lambda cells: st.tuples(st.just(cells), st.sets(st.integers(0, cells - 1), min_size=3, max_size=cells))
    ),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 20, 32, 44]),
    st.sampled_from([0, 1, 5, 300]),
    st.lists(st.floats(0.01, 1e6), min_size=6, max_size=6),
    st.integers(0, 99),
)
def test_rows_add_up_to_the_fixed_point_sum(
    cells: tuple[int, set[int]], dtype: torch.dtype, bits: int, numel: int, counts: list[float], seed: int
) -> None:
    count, present = cells
    ranks = begun(count, bits, sorted(present))
    shares = {cell: counts[cell] / sum(counts[other] for other in present) for cell in present}
    values = {cell: drawn(numel, seed + cell, dtype) for cell in present}
    rows = rows_of(ranks, values, shares)
    for column in range(numel):
        expected = sum(round(float(values[cell][column]) * (shares[cell] * 2.0**bits)) for cell in present)
        assert wrapped(sum(int(rows[cell][column]) for cell in present)) == wrapped(expected)
    outs = []
    for masker in ranks:  # also cells that give nothing learn the sum
        outs.append(torch.empty(numel, dtype=dtype))
        masker.decode([rows[cell] for cell in sorted(present, key=lambda cell: (cell * 5 + seed) % 7)], outs[-1])
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [16, 32, 46])
def test_the_error_of_the_mean_is_within_its_bound(dtype: torch.dtype, bits: int) -> None:
    weights = (3.0, 0.1, 7.25, 100.0)
    ranks, numel = begun(4, bits), 400
    values = {cell: drawn(numel, cell, dtype) * 10.0 ** (cell - 2) for cell in range(4)}
    rows = rows_of(ranks, values, {cell: weight / sum(weights) for cell, weight in enumerate(weights)})
    out = torch.empty(numel, dtype=torch.float64)
    ranks[0].decode(list(rows.values()), out)
    total = sum(map(Fraction, weights))
    for column in range(numel):
        parts = [
            Fraction(weight) * Fraction(float(values[cell][column])) / total for cell, weight in enumerate(weights)
        ]
        error = abs(Fraction(float(out[column])) - sum(parts))
        assert error <= Fraction(4, 2 ** (bits + 1)) + sum(map(abs, parts)) / 2**51
    narrow = torch.empty(numel, dtype=dtype)
    ranks[0].decode(list(rows.values()), narrow)
    assert torch.equal(narrow, out.to(dtype) if dtype.itemsize >= 4 else out.float().to(dtype))


@pytest.mark.parametrize("cells", [3, 6])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_values_up_to_the_limit_do_not_overflow(cells: int, sign: float) -> None:
    ranks = begun(cells)
    limit = sign * SecureSum().limit
    rows = rows_of(ranks, {cell: torch.full((3,), limit, dtype=torch.float64) for cell in range(cells)})
    out = torch.empty(3, dtype=torch.float64)
    ranks[0].decode(list(rows.values()), out)
    assert out.tolist() == pytest.approx([limit] * 3, rel=1e-15)


def test_large_buckets_and_how_fast_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    numel, cells = 4 * 2**20 + 3, 3
    ranks = begun(cells)
    values = {cell: drawn(numel, cell) for cell in range(cells)}
    mask = torch.empty(CHUNK, dtype=torch.int64)
    stream = Keystream(bytes(32))
    start = time.perf_counter()
    for _ in range(64):
        stream.fill(mask)
    keyed = time.perf_counter()
    rows = rows_of(ranks, values)
    masked = time.perf_counter()
    out = torch.empty(numel)
    ranks[0].decode(list(rows.values()), out)
    read = time.perf_counter()
    with capsys.disabled():
        print(
            f"\n  keystream {64 * mask.nbytes / (keyed - start) / 1e6:.0f} MB/s; of fp32 values with {cells} cells: "
            f"encode {cells * 4 * numel / (masked - keyed) / 1e6:.0f} MB/s, decode "
            f"{4 * numel / (read - masked) / 1e6:.0f} MB/s"
        )
    mean = torch.stack([value.double() for value in values.values()]).mean(0)
    assert float((out.double() - mean).abs().max()) <= 3 * 2.0**-33 + 2.0**-23


def test_two_hops_sum_each_part_where_it_is_combined() -> None:
    """Parts of a bucket, as lanes cut them, with a carrier in each cell that is not the cell's first rank."""
    ranks = maskers(3, ranks_of_cell=2)
    senders = {0: 1, 1: 2, 2: 5}
    values = {cell: drawn(10, cell, torch.float64) for cell in senders}
    parts = [slice(0, 4), slice(4, 8), slice(8, 10)]
    out = torch.empty(10, dtype=torch.float64)
    sent: dict[tuple[int, int], torch.Tensor] = {}
    for cell, rank in senders.items():
        ranks[rank].start_attempt(1, senders)
        for part, where in enumerate(parts):
            sent[cell, part] = torch.empty(where.stop - where.start, dtype=torch.int64)
            place = (("lane", (0, 1)), 0, part)
            ranks[rank].encode(values[cell][where], 1 / 3, sent[cell, part], place=place, senders=senders)
    for part, where in enumerate(parts):
        ranks[senders[part]].decode([sent[cell, part] for cell in senders], out[where])
    torch.testing.assert_close(out, torch.stack(list(values.values())).mean(0), rtol=0, atol=3 * 2.0**-33)


# Silence --------------------------------------------------------------------------------------------------------------


def chi_square(row: torch.Tensor) -> float:
    """Return how far a row's bytes are from equally many of each, in standard deviations."""
    counts = torch.bincount(row.view(torch.uint8).long(), minlength=256).double()
    expected = row.nbytes / 256
    return (float(((counts - expected) ** 2 / expected).sum()) - 255) / math.sqrt(2 * 255)


def test_rows_look_like_noise_until_the_last_is_added() -> None:
    numel, cells = 60_000, 4
    ranks = begun(cells)
    values = {cell: torch.full((numel,), 1.0 + cell) for cell in range(cells)}  # a pattern that would show
    rows = rows_of(ranks, values)
    assert chi_square(torch.full((numel,), 2**32, dtype=torch.int64)) > 1000, "the test sees a pattern"
    for count in range(1, cells):
        for some in itertools.combinations(rows.values(), count):
            seen = some[0].clone()
            for row in some[1:]:
                seen += row
            assert abs(chi_square(seen)) < 8
            assert float((seen.double() * 2.0**-63).mean().abs()) < 6 / math.sqrt(3 * numel)
    total = rows[0] + rows[1] + rows[2] + rows[3]
    assert len(total.unique()) == 1


def test_a_curious_cell_learns_the_sum_of_the_others_only() -> None:
    """Cell 0 takes the masks that it shares off cell 1's row: those of cell 1 with cell 2 remain."""
    numel = 20_000
    ranks = begun(3)
    values = {cell: torch.full((numel,), float(cell)) for cell in range(3)}
    rows = rows_of(ranks, values)
    mask = torch.empty(numel, dtype=torch.int64)
    Keystream(ranks[0]._key(1, PLACE)).fill(mask)
    assert abs(chi_square(rows[1] + mask)) < 8
    own = torch.empty(numel, dtype=torch.int64)
    Keystream(ranks[2]._key(1, PLACE)).fill(own)
    bare = rows[1] + mask - own
    assert bare.unique().tolist() == [round(2**32 / 3)], "both other cells together do read it"


def test_a_cell_that_gives_nothing_keeps_its_masks_and_the_sum_of_the_others() -> None:
    ranks = begun(3)
    values = {cell: torch.full((2_000,), float(cell)) for cell in range(3)}
    ranks[0].abandon()
    rows = rows_of(ranks, values)
    assert not rows[0].any()
    assert abs(chi_square(rows[1] + rows[2])) < 8
    with pytest.raises(RoundError, match="do not cancel"):
        ranks[1].decode(list(rows.values()), torch.empty(2_000))
    for masker in ranks:
        masker.start_attempt(2, range(3))
    assert rows_of(ranks, values)[0].any(), "the next attempt has masks again"


def test_two_cells_are_refused_and_absent_ones_do_not_count() -> None:
    with pytest.raises(RoundError, match=r"cells \[0, 2\].*needs 3"):
        maskers(4)[0].start_attempt(1, [2, 0, 0])
    masker = begun(4, present=[0, 1, 2])[0]
    with pytest.raises(StateError, match="senders"):
        masker.encode(torch.ones(1), 0.5, torch.empty(1, dtype=torch.int64), place=PLACE, senders={0: 0, 1: 1})


def test_a_round_without_enough_cells_leaves_no_cells_behind() -> None:
    masker = begun(3)[0]
    with pytest.raises(RoundError):
        masker.start_attempt(2, [0, 1])
    with pytest.raises(StateError, match="senders"):
        masker.encode(torch.ones(1), 0.5, torch.empty(1, dtype=torch.int64), place=PLACE, senders={0: 0, 1: 1, 2: 2})


# No mask twice --------------------------------------------------------------------------------------------------------


def test_masks_differ_by_attempt_lane_bucket_part_and_pair() -> None:
    ranks, numel = maskers(4), 64
    zeros = {cell: torch.zeros(numel) for cell in range(4)}
    rows = []
    for attempt in (1, 2, 5):
        for masker in ranks:
            masker.start_attempt(attempt, range(4))
        for place in itertools.product(("lane a", ("lane", 1)), (0, 1), (-1, 0, 1)):
            rows += rows_of(ranks, zeros, place=place).values()
    distinct = {row.numpy().tobytes() for row in rows}
    assert len(distinct) == len(rows) == 3 * 12 * 4
    numbers = torch.cat(rows)
    assert len(numbers.unique()) == numbers.numel(), "nor do they share a block"


def test_no_key_makes_two_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key is used by the two ends of one pair, for one row each, in rounds of which some are repeated."""
    used: list[bytes] = []

    class Recorded(Keystream):
        def __init__(self, key: bytes) -> None:
            used.append(key)
            super().__init__(key)

    monkeypatch.setattr(secure, "Keystream", Recorded)
    ranks = maskers(5)
    turnouts = [range(5), range(5), [0, 2, 4], [1, 2, 3, 4], range(5)]
    for present in turnouts:  # after the first, as if the round had been rejected
        attempt = max(masker.next_attempt for masker in ranks)
        for masker in ranks:
            masker.start_attempt(attempt, present)
        for lane, bucket, part in itertools.product("ab", range(3), range(2)):
            rows_of(ranks, {cell: drawn(4, cell) for cell in present}, place=(lane, bucket, part))
    pairs = sum(len(present) * (len(present) - 1) // 2 for present in turnouts)
    assert set(Counter(used).values()) == {2}
    assert len(set(used)) == pairs * 12


def test_an_attempt_is_never_begun_again() -> None:
    masker = maskers(3)[0]
    assert masker.next_attempt == 1
    masker.start_attempt(4, range(3))
    with pytest.raises(RoundError):
        masker.start_attempt(5, [0])
    for old in (0, 1, 4, 5):
        with pytest.raises(StateError, match="start with 6"):
            masker.start_attempt(old, range(3))
    masker.start_attempt(6, range(3))


def test_a_place_has_one_row_in_an_attempt() -> None:
    ranks = begun(3)
    values = {cell: drawn(5, cell) for cell in range(3)}
    rows_of(ranks, values)
    out = torch.full((5,), 7, dtype=torch.int64)
    with pytest.raises(StateError, match="already"):
        ranks[0].encode(values[1], 0.5, out, place=PLACE, senders={0: 0, 1: 1, 2: 2})
    assert not out.any()


def test_new_maskers_share_nothing_with_those_before() -> None:
    """As after a restart from a checkpoint, when attempts count from 1 again."""
    zeros = {cell: torch.zeros(50) for cell in range(3)}
    first, second = (rows_of(begun(3), zeros) for _ in range(2))
    assert all(not bool((first[cell] == second[cell]).any()) for cell in range(3))


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [2.0**31, -(2.0**31), math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_out_of_range_leave_nothing_to_send(wrong: float, dtype: torch.dtype) -> None:
    values = torch.ones(CHUNK + 5, dtype=dtype)
    values[-2] = wrong
    out = torch.full((CHUNK + 5,), 3, dtype=torch.int64)
    with pytest.raises(RoundError, match=r"cell 1 .*fraction_bits"):
        begun(3)[1].encode(values, 0.25, out, place=PLACE, senders={0: 0, 1: 1, 2: 2})
    assert not out.any()


def test_masks_that_do_not_cancel_are_noticed() -> None:
    ranks = begun(3)
    values = {cell: drawn(200, cell) for cell in range(3)}
    old = rows_of(ranks, values)
    for masker in ranks:
        masker.start_attempt(2, range(3))
    new = rows_of(ranks, values)
    out = torch.empty(200)
    with pytest.raises(RoundError, match="do not cancel in attempt 2"):
        ranks[0].decode([old[0], new[1], new[2]], out)
    with pytest.raises(RoundError, match="do not cancel"):
        ranks[0].decode([torch.zeros(200, dtype=torch.int64), new[1], new[2]], out)
    with pytest.raises(StateError, match="2 rows"):
        ranks[0].decode([new[1], new[2]], out)


@pytest.mark.parametrize("bits", [0, 61, -3, 32.0, True, "32"])
def test_fraction_bits_that_cannot_be_meant(bits: Any) -> None:
    with pytest.raises(ConfigError, match="fraction_bits"):
        SecureSum(bits)


# Keys -----------------------------------------------------------------------------------------------------------------


def hkdf(secret: bytes, info: bytes) -> bytes:
    """RFC 5869 for one block of SHA-256, without salt."""
    extracted = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()


def test_both_ends_agree_on_the_secret_of_rfc_7748() -> None:
    shared = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    pairs = KeyPair(), KeyPair()
    for pair, private in zip(
        pairs,
        (
            "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a",
            "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb",
        ),
        strict=True,
    ):
        pair._private = x25519.X25519PrivateKey.from_private_bytes(bytes.fromhex(private))
        pair.public = pair._private.public_key().public_bytes_raw()
    alice, bob = pairs
    info = repr(("xffl pair", *sorted((alice.public, bob.public)), ("run", 1))).encode()
    assert alice.agree_secret(bob.public, ("run", 1)) == hkdf(shared, info)
    assert bob.agree_secret(alice.public, ("run", 1)) == hkdf(shared, info)


def test_secrets_differ_by_pair_and_context() -> None:
    pairs = [KeyPair() for _ in range(3)]
    secrets = {a.agree_secret(b.public, context) for a, b in itertools.combinations(pairs, 2) for context in ("x", "y")}
    assert len(secrets) == 6


@pytest.mark.parametrize("public", [bytes(32), b"short"])
def test_a_public_key_that_is_none_is_refused(public: bytes) -> None:
    with pytest.raises(RoundError, match=public.hex()):
        KeyPair().agree_secret(public, "x")


def test_private_keys_stay_in_the_process() -> None:
    masker = begun(3)[0]
    for secret in (masker, masker._keys):
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            if secret is masker and way is copy.copy:
                continue  # shares the keys that are here already
            with pytest.raises(TypeError, match="private key"):
                way(secret)


# All ranks together ---------------------------------------------------------------------------------------------------


def _sum_over_ranks(rank: int, world_size: int) -> list[float]:
    topology = Topology(world_size, 1)
    masker = make_masker(SecureSum(), rank, topology, context="plan")
    masker.start_attempt(masker.next_attempt, range(world_size))
    row = torch.empty(2, dtype=torch.int64)
    senders = {cell: cell for cell in range(world_size)}
    masker.encode(torch.tensor([1.0, float(rank)]), 1 / world_size, row, place=PLACE, senders=senders)
    rows = [torch.empty_like(row) for _ in range(world_size)]
    torch.distributed.all_gather(rows, row)
    out = torch.empty(2)
    masker.decode(rows, out)
    return [*out.tolist(), float(row[0])]


def _make(rank: int, world_size: int, bits: Sequence[int]) -> None:
    make_masker(SecureSum(bits[rank]), rank, Topology(world_size, 1), context="plan")


def test_ranks_agree_on_keys() -> None:
    results = run_world(3, _sum_over_ranks)
    assert [result[:2] for result in results] == [[1.0, 1.0]] * 3
    assert len({result[2] for result in results}) == 3


@pytest.mark.parametrize("bits, match", [((32, 32), "at least 3 cells"), ((32, 32, 30), "different secure sums")])
def test_ranks_refuse_alike(bits: tuple[int, ...], match: str) -> None:
    with pytest.raises(WorldError, match=match):
        run_world(len(bits), _make, bits)
