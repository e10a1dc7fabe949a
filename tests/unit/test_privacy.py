"""Clipping, noise and their account, against closed forms and plain numpy."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xffl.aggregation.arithmetic import CHUNK
from xffl.aggregation.options import Options
from xffl.aggregation.privacy import Accountant, Keystream, Noise, Privacy, privatize
from xffl.errors import CheckpointError, ConfigError, RoundError
from xffl.extras import install_command

ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def cdf(x: float) -> float:
    """The normal distribution's."""
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


def drawn(numel: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


# Clipping -------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.lists(st.integers(0, 400), min_size=1, max_size=4), st.integers(0, 9)
)
def test_a_sharded_update_has_at_most_the_clip_and_keeps_its_direction(
    clip: float, size: float, shards: list[int], seed: int
) -> None:
    privacy, noise = Privacy(clip, 0.0), Noise(0, 1)
    anchors = [drawn(numel, seed + 10 * shard) for shard, numel in enumerate(shards)]
    steps = [drawn(numel, seed + 10 * shard + 5, size) for shard, numel in enumerate(shards)]
    norm = math.sqrt(sum(float(step.square().sum()) for step in steps))
    got = []
    for anchor, step in zip(anchors, steps, strict=True):
        values = anchor + step
        privatize(values, anchor, privacy.scale_of(norm), privacy.deviation(3), noise)
        got.append((values - anchor).numpy())
    clipped, whole = np.concatenate(got), torch.cat(steps).numpy()
    assert np.linalg.norm(clipped) <= clip * (1 + 1e-9)
    np.testing.assert_allclose(clipped, whole * min(1.0, clip / norm if norm else 1.0), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 7, CHUNK + 1])
def test_values_of_each_type_are_those_of_64_bits_rounded_once(dtype: torch.dtype, numel: int) -> None:
    anchor = drawn(numel, 1).float()
    values = (anchor + drawn(numel, 2, 0.1)).to(dtype)
    wide = anchor.double() + 0.3 * (values.double() - anchor.double())
    wide += 0.05 * torch.cat(noise_in_chunks(numel, Noise(4, 9)))
    privatize(values, anchor, 0.3, 0.05, Noise(4, 9))
    assert torch.equal(values, wide.to(dtype) if dtype.itemsize >= 4 else wide.float().to(dtype))


def noise_in_chunks(numel: int, noise: Noise) -> list[torch.Tensor]:
    return [noise.normal(min(CHUNK, numel - start)) for start in range(0, numel, CHUNK)] or [torch.empty(0)]


def test_large_values_keep_a_small_step() -> None:
    """In fp32 the step would be lost beside the anchor's neighbours before it is scaled."""
    anchor = torch.tensor([2.0**24, 1.0], dtype=torch.float64)
    values = anchor + torch.tensor([0.5, 2.0**-40])
    privatize(values, anchor, 0.5, 0.0, Noise(0, 0))
    assert (values - anchor).tolist() == [0.25, 2.0**-41]


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_fails_the_round(norm: float) -> None:
    with pytest.raises(RoundError, match=str(norm)):
        Privacy(1.0, 1.0).scale_of(norm)


# Noise ----------------------------------------------------------------------------------------------------------------


def test_the_keystream_is_aes_in_counter_mode() -> None:
    key = bytes(range(32))
    out = torch.empty(101, dtype=torch.int64)
    stream = Keystream(key)
    stream.fill(out[:48])
    stream.fill(out[:0])
    stream.fill(out[48:])
    blocks = b"".join(counter.to_bytes(16, "big") for counter in range(51))
    oracle = ciphers.Cipher(ciphers.algorithms.AES(key), ciphers.modes.ECB()).encryptor().update(blocks)
    assert out.numpy().tobytes() == oracle[: 101 * 8]


def test_noise_is_normal() -> None:
    numel = 1_000_001
    numbers = np.sort(Noise(0, seed=3).normal(numel).numpy())
    assert abs(numbers.mean()) < 5 / math.sqrt(numel)
    assert abs(numbers.var() - 1) < 5 * math.sqrt(2 / numel)
    places = np.arange(1, numel + 1, 997)
    distance = max(abs(cdf(numbers[place - 1]) - place / numel) for place in places)
    assert distance < 2.5 / math.sqrt(numel), "Kolmogorov and Smirnov: chance 1e-5"
    for bound in (3.0, 4.0):
        expected = numel * 2 * cdf(-bound)
        assert abs(int((np.abs(numbers) > bound).sum()) - expected) < 6 * math.sqrt(expected)


@pytest.mark.parametrize("bits, expected", [(0, [math.sqrt(106 * math.log(2)), 0.0]), (-1, [0.0, 0.0])])
def test_extreme_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch, bits: int, expected: list[float]) -> None:
    monkeypatch.setattr(Keystream, "fill", lambda stream, out: out.fill_(bits))
    assert Noise(0).normal(2).tolist() == pytest.approx(expected, abs=1e-12)


def test_ranks_rounds_and_runs_have_noise_of_their_own() -> None:
    numel = 40_000
    first = Noise(0, 7)
    streams = [first.normal(numel), first.normal(numel), Noise(1, 7).normal(numel), Noise(0, 8).normal(numel)]
    streams += [Noise(0).normal(numel), Noise(0).normal(numel), *streams[0].view(2, -1).repeat(1, 2)]
    for a in range(len(streams) - 2):
        for b in range(a):
            assert abs(float(streams[a] @ streams[b])) / numel < 6 / math.sqrt(numel)
    halves = streams[0].view(2, -1)  # the cosines and the sines
    assert abs(float(halves[0] @ halves[1])) / (numel / 2) < 6 / math.sqrt(numel / 2)
    assert torch.equal(Noise(0, 7).normal(numel), streams[0]), "a seed repeats a run's noise"


def test_a_repeated_round_has_fresh_noise() -> None:
    noise = Noise(2, 1)
    messages = []
    for _ in range(2):
        values = torch.zeros(1000)
        privatize(values, torch.zeros(1000), 1.0, 1.0, noise)
        messages.append(values)
    assert not torch.equal(*messages)
    assert abs(float(messages[0] @ messages[1])) / 1000 < 6 / math.sqrt(1000)


@pytest.mark.parametrize("cells", [3, 5])
@pytest.mark.parametrize("where", ["cell", "sum"])
def test_noise_has_the_size_that_was_asked_for(where: str, cells: int) -> None:
    privacy, numel = Privacy(0.7, 1.5, where=where, seed=2), 200_000
    rows = []
    for rank in range(cells):
        values = torch.zeros(numel, dtype=torch.float64)
        privatize(values, torch.zeros(numel), 1.0, privacy.deviation(cells), Noise(rank, privacy.seed))
        rows.append(values)
    seen = rows[0] if where == "cell" else sum(rows[1:], rows[0])
    assert float(seen.std()) == pytest.approx(0.7 * 1.5, rel=6 / math.sqrt(2 * numel))


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip": 0.0},
        {"clip": math.inf},
        {"clip": "1"},
        {"clip": True},
        {"noise": -1.0},
        {"noise": 1e-200},
        {"noise": 1e200},
        {"noise": math.nan},
        {"where": "server"},
        {"delta": 0.0},
        {"delta": 1.0},
        {"seed": 1.5},
        {"seed": True},
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_named(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError) as caught:
        Privacy(**({"clip": 1.0, "noise": 1.0} | wrong))
    assert name in str(caught.value) and str(value) in str(caught.value)


def test_noise_for_the_sum_needs_secure_sums() -> None:
    plain = {"combine": "mean", "server": None, "nonfinite": "reject", "form": "auto", "bucket_bytes": 1024}
    plain |= {"atomic": True, "rails": False, "fragments": 1, "overlap": False, "norms": False}
    with pytest.raises(ConfigError, match="secure sums"):
        Options.of(privacy=Privacy(1.0, 1.0, where="sum"), secure=False, **plain)
    Options.of(privacy=Privacy(1.0, 1.0, where="sum"), secure=True, **plain)
    Options.of(privacy=Privacy(1.0, 1.0), secure=False, **plain)


@pytest.mark.parametrize(
    "package, use",
    [
        ("cryptography.hazmat.primitives.ciphers", lambda: Noise(0)),
        ("opacus.accountants", lambda: spent(Privacy(1.0, 1.0)).epsilon()),
    ],
)
def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, package: str, use: Callable[[], object]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=re.escape(install_command("privacy"))):
        use()


# The account ----------------------------------------------------------------------------------------------------------


def spent(privacy: Privacy, cells: int = 4, rounds: int = 1) -> Accountant:
    accountant = Accountant(privacy)
    accountant.spend(cells, rounds)
    return accountant


def rdp_epsilon(squares: float, delta: float) -> float:
    """Minimize the Rényi bound by calculus of one variable; ``squares`` is the sum of 1/multiplier^2 over rounds."""

    def bound(log_excess: float) -> float:
        order = 1 + math.exp(log_excess)
        return order * squares / 2 + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)

    low, high = -12.0, 20.0
    for _ in range(300):
        a, b = low + (high - low) * 0.382, low + (high - low) * 0.618
        low, high = (low, b) if bound(a) < bound(b) else (a, high)
    return bound(low)


def exact_epsilon(squares: float, delta: float) -> float:
    """Solve for the least epsilon of Gaussian noise (Balle and Wang, 2018, arXiv 1805.06530)."""
    mu = math.sqrt(squares)
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        upper, lower = cdf(mu / 2 - middle / mu), cdf(-mu / 2 - middle / mu)
        spare = 0.0 if lower == 0.0 else math.exp(middle + math.log(lower))
        low, high = (middle, high) if upper - spare > delta else (low, middle)
    return high


@pytest.mark.parametrize("noise", [0.3, 1.0, 4.0, 50.0])
@pytest.mark.parametrize("rounds", [1, 10, 500])
@pytest.mark.parametrize("delta", [1e-5, 1e-9])
@pytest.mark.parametrize("neighbours, factor", [("zero", 1.0), ("replace", 2.0)])
def test_epsilon_against_the_closed_form(
    noise: float, rounds: int, delta: float, neighbours: str, factor: float
) -> None:
    squares = rounds * (factor / noise) ** 2
    got = spent(Privacy(2.0, noise), rounds=rounds).epsilon(delta, neighbours=neighbours)
    assert got == pytest.approx(rdp_epsilon(squares, delta), rel=5e-3)
    exact = exact_epsilon(squares, delta)
    assert exact <= got <= 1.35 * exact, "a bound, and not a loose one"


def test_a_large_epsilon_and_none() -> None:
    squares = 2000 * (2 / 0.1) ** 2
    assert spent(Privacy(1.0, 0.1), rounds=2000).epsilon() == pytest.approx(rdp_epsilon(squares, 1e-5), rel=5e-3)
    assert spent(Privacy(1.0, 0.0)).epsilon() == math.inf
    assert Accountant(Privacy(1.0, 0.0)).epsilon() == 0.0


@pytest.mark.parametrize("colluding", [1, 2, 4, 5])
def test_who_takes_part_in_a_sum_knows_its_own_noise(colluding: int) -> None:
    got = spent(Privacy(1.0, 3.0, where="sum"), cells=5, rounds=7).epsilon(neighbours="zero", colluding=colluding)
    left = 9.0 * (5 - colluding) / 5
    assert got == (math.inf if not left else pytest.approx(rdp_epsilon(7 / left, 1e-5), rel=5e-3))


def test_colluding_cells_take_nothing_off_a_message_of_its_own_noise() -> None:
    accountant = spent(Privacy(1.0, 3.0), cells=5)
    assert accountant.epsilon(colluding=4) == accountant.epsilon(colluding=0)


@pytest.mark.parametrize("cells", [3, 7])
@pytest.mark.parametrize("where", ["cell", "sum"])
@pytest.mark.parametrize("neighbours", ["zero", "replace"])
def test_the_sensitivity_over_the_noise_of_what_is_seen(where: str, neighbours: str, cells: int) -> None:
    """The worst change of one cell's update, measured on what ``privatize`` gives, decides the epsilon."""
    privacy, quiet = Privacy(0.25, 2.0, where=where), Noise(0, 0)
    anchor = drawn(50, 1)
    step = drawn(50, 2, 100.0)
    scale = privacy.scale_of(float(step.norm()))

    def seen(change: float) -> torch.Tensor:
        mine = anchor + change * step
        privatize(mine, anchor, scale, 0.0, quiet)
        others = [anchor.clone() for _ in range(cells - 1)]
        return mine if where == "cell" else torch.stack([mine, *others]).mean(0)

    sensitivity = float((seen(1.0) - seen(0.0 if neighbours == "zero" else -1.0)).norm())
    deviation = privacy.deviation(cells)
    if where == "sum":  # of the mean, less what one curious cell knows
        deviation = math.sqrt(cells - 1) * deviation / cells
    got = spent(privacy, cells, rounds=20).epsilon(neighbours=neighbours)
    assert got == pytest.approx(rdp_epsilon(20 * (sensitivity / deviation) ** 2, 1e-5), rel=5e-3)


def test_the_account_goes_on_in_another_run_with_other_noise() -> None:
    before = spent(Privacy(1.0, 1.0), rounds=3)
    after = Accountant(Privacy(1.0, 4.0))
    after.load_state_dict(before.state_dict())
    after.spend(4, 5)
    after.spend(3, 2)
    assert after.rounds == 10
    assert after.epsilon(neighbours="zero") == pytest.approx(rdp_epsilon(3 + 7 / 16, 1e-5), rel=5e-3)
    copy = spent(Privacy(9.0, 9.0), rounds=30)
    copy.load_state_dict(after.state_dict())
    assert copy.epsilon() == after.epsilon() and before.rounds == 3


@pytest.mark.parametrize(
    "state", [{}, {"spent": [[1.0, "cell"]]}, {"spent": [[1.0, "moon", 3, 1]]}, {"spent": 3}], ids=str
)
def test_a_state_of_something_else_is_refused(state: dict[str, Any]) -> None:
    accountant = spent(Privacy(1.0, 1.0))
    with pytest.raises(CheckpointError, match="accountant"):
        accountant.load_state_dict(state)
    assert accountant.rounds == 1


@pytest.mark.parametrize("wrong", [(0, 1), (4, -99), (4, 0), (2.5, 1), (True, 1)], ids=str)
def test_what_is_no_number_of_exchanges_is_not_counted(wrong: tuple[Any, Any]) -> None:
    accountant = spent(Privacy(1.0, 1.0))
    with pytest.raises(ConfigError, match="must be a positive integer, got"):
        accountant.spend(*wrong)
    assert accountant.rounds == 1


@pytest.mark.parametrize(
    "wrong", [{"delta": 0.0}, {"neighbours": "friends"}, {"colluding": -1}, {"colluding": True}], ids=str
)
def test_a_question_that_cannot_be_meant(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(wrong.values())))):
        spent(Privacy(1.0, 1.0)).epsilon(**wrong)
