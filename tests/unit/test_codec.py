"""Codecs against oracles in numpy: sizes, bounds, bytes, ties, noise, names."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xffl.aggregation import compression as quantize
from xffl.aggregation import two_bits
from xffl.aggregation.compression import Blockwise, Cast, Codec, CodePlace, ErrorFeedback, TopK, codec_of
from xffl.aggregation.two_bits import SparseBlocks, TwoBits
from xffl.errors import ConfigError
from xffl.message_sizes.codecs import codec_ratio

Floats = npt.NDArray[np.float64]

NEAREST = ["bf16", "fp16", "int8", "int4", "int8:block=7,scale=fp32", "int4:block=33", "int4:scale=fp32"]
STOCHASTIC = ["int8:rounding=stochastic", "int4:block=5,rounding=stochastic", "int4:scale=fp32,rounding=stochastic"]
SPARSE = ["topk:0.01", "topk:0.07,value=fp16", "topk:0.5", "topk:1", "sparseloco", "sparseloco:density=0.3,decay=1"]
TWO_BITS = ["int2", "int2:block=7"]
ALL = NEAREST + STOCHASTIC + SPARSE + TWO_BITS
BLOCKWISE = [name for name in NEAREST + STOCHASTIC if name.startswith("int")]

LARGEST = float(torch.finfo(torch.float32).max)
SIZES = [0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 129, 1001, 2**16 - 1, 2**16 + 1, 150_001]
MAGNITUDES = [1e-45, 1e-40, 1.2e-38, 1e-30, 1e-20, 1e-9, 1e-5, 1.0, 7e4, 1e20, 3e38, LARGEST]

numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
alike = st.floats(-1.0, 1.0, width=32)
vectors = st.one_of(st.lists(numbers, max_size=150), st.lists(alike, max_size=150))


def made(name: str) -> Codec:
    codec = codec_of(name)
    assert codec is not None
    return codec


def normal(numel: int, seed: int = 0, scale: float = 1e-4) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def encoded(codec: Codec, values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    out = torch.full((codec.nbytes(values.numel()),), 0xA5, dtype=torch.uint8)
    kept = values.clone()
    codec.encode(values, out, seed)
    assert torch.equal(values.view(torch.int32), kept.view(torch.int32)), "encoding changes nothing"
    return out


def decoded(codec: Codec, data: torch.Tensor, numel: int) -> torch.Tensor:
    out = torch.full((numel,), float("nan"))
    codec.decode(data, out)
    return out


def round_trip(codec: Codec, values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return decoded(codec, encoded(codec, values, seed), values.numel())


def exact(values: torch.Tensor) -> Floats:
    return values.numpy().astype(np.float64)


def blocks(numel: int, block: int) -> Iterator[slice]:
    for start in range(0, numel, block):
        yield slice(start, min(start + block, numel))


def parts_of(codec: Blockwise, data: torch.Tensor, numel: int) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Read steps and whole numbers out of the bytes, without the package."""
    if numel == 0:
        return np.zeros(0), np.zeros(0, dtype=np.int64)
    raw = data.numpy().tobytes()
    count = math.ceil(numel / codec.block)
    if codec.scale == "fp32":
        steps, body = np.frombuffer(raw[: 4 * count], "<f4").astype(np.float64), raw[4 * count :]
    else:
        unit = float(np.frombuffer(raw[:4], "<f4")[0])
        steps = np.frombuffer(raw[4 : 4 + 2 * count], "<f2").astype(np.float64) * unit
        body = raw[4 + 2 * count :]
    if codec.bits == 8:
        return steps, np.array([byte - 256 if byte > 127 else byte for byte in body], dtype=np.int64)
    numbers = np.zeros(numel, dtype=np.int64)
    at = 0
    for start in range(0, numel, 2 * codec.block):  # a block and the one after it, or what is left and its other half
        middle = min(codec.block, math.ceil((numel - start) / 2))
        first = range(start, start + middle)
        second = range(start + middle, min(start + 2 * middle, numel))
        for offset, byte in enumerate(body[at : at + middle]):
            signed = byte - 256 if byte > 127 else byte
            upper = math.floor((signed + 8) / 16)
            numbers[first[offset]] = signed - 16 * upper
            if offset < len(second):
                numbers[second[offset]] = upper
            else:
                assert upper == 0, "the half beside an odd value is 0"
        at += middle
    assert at == len(body)
    return steps, numbers


def fingerprint(names: list[str]) -> str:
    """Return a hash of what each codec makes of the same values. They come from numpy: torch.randn is not portable."""
    source = np.random.default_rng(0)
    parts = [source.standard_normal(30_001) * scale for scale in (1e-42, 1e-38, 1e-5, 1.0, 1e30)]
    x = torch.from_numpy(np.concatenate(parts).astype(np.float32))
    result = hashlib.sha256(x.numpy().tobytes())
    for name in names:
        data = encoded(made(name), x, seed=7)
        result.update(data.numpy().tobytes() + decoded(made(name), data, x.numel()).numpy().tobytes())
    return result.hexdigest()


# Every codec


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("numel", SIZES)
def test_every_size_fills_exactly_its_bytes(name: str, numel: int) -> None:
    codec = made(name)
    size = codec.nbytes(numel)
    values = normal(numel, seed=numel)
    whole = encoded(codec, values, seed=3)
    result = decoded(codec, whole, numel)
    assert result.isfinite().all()
    for offset in (1, 3):
        frame = torch.full((size + 8,), 0x5A, dtype=torch.uint8)
        codec.encode(values, frame[offset : offset + size], 3)
        assert torch.equal(frame[offset : offset + size], whole)
        assert (frame[:offset] == 0x5A).all() and (frame[offset + size :] == 0x5A).all()
        assert torch.equal(decoded(codec, frame[offset : offset + size], numel), result)


@pytest.mark.parametrize(
    "name, per_value, per_block, block, fixed",
    [
        ("bf16", 2, 0, 1, 0),
        ("fp16", 2, 0, 1, 0),
        ("int8", 1, 2, 64, 4),
        ("int4", 0.5, 2, 64, 4),
        ("int8:block=128,scale=fp32", 1, 4, 128, 0),
        ("int4:block=3,scale=fp32", 0.5, 4, 3, 0),
    ],
)
def test_sizes_by_formula(name: str, per_value: float, per_block: int, block: int, fixed: int) -> None:
    codec = made(name)
    assert codec.nbytes(0) == 0
    for numel in [*range(1, 300), 10**6 + 1]:
        expected = math.ceil(per_value * numel) + per_block * math.ceil(numel / block) + fixed
        assert codec.nbytes(numel) == expected


def test_the_density_is_the_decimal_number_that_was_written() -> None:
    assert made("topk:0.07").nbytes(100) == 7 * 8, "0.07 * 100 is more than 7 in floats"
    for text in ("0.01", "0.1", "0.29", "1e-3", "1", "0.57"):
        for numel in (1, 2, 99, 100, 101, 1000, 10**7):
            kept = math.ceil(Fraction(text) * numel)
            assert made(f"topk:{text}").nbytes(numel) == 8 * kept
            assert made(f"topk:{text},value=fp16").nbytes(numel) == 6 * kept
    assert made("topk:0.01").nbytes(0) == 0


@pytest.mark.parametrize("name, limit", [("int8", 0.27), ("int4", 0.14), ("int8:scale=fp32", 0.27), ("bf16", 0.5)])
def test_ratios_of_the_issue(name: str, limit: float) -> None:
    for numel in (10_000, 2**20, 2**23 + 1):
        assert made(name).nbytes(numel) <= limit * 4 * numel


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40, deadline=None)
@given(values=vectors, seed=st.integers(0, 2**63 - 1))
def test_finite_values_stay_finite_and_zeros_stay_zeros(name: str, values: list[float], seed: int) -> None:
    codec = made(name)
    x = torch.tensor(values, dtype=torch.float32)
    result = round_trip(codec, x, seed)
    assert result.isfinite().all()
    assert name in TWO_BITS or (result[x == 0] == 0).all()
    assert torch.equal(encoded(codec, x, seed), encoded(codec, x.clone(), seed)), "same input, same bytes"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_extreme_magnitudes(name: str, magnitude: float) -> None:
    x = torch.full((300,), magnitude)
    x[1::2] *= -1
    x[200:] = 0
    result = round_trip(made(name), x, seed=1)
    assert result.isfinite().all()
    assert (result[256:] == 0).all()
    assert name in TWO_BITS or (result[200:] == 0).all()
    assert (result * x.sign() >= 0).all()
    codec = made(name)
    if isinstance(codec, Blockwise) and magnitude >= 1e-30:
        # Blocks whose values are all the largest are off by at most a step, and by the scale's rounding.
        step = 1.002 / (2 ** (codec.bits - 1) - 1)
        assert torch.allclose(result[:200].double(), x[:200].double(), rtol=step, atol=0.0)


@pytest.mark.parametrize("name", ALL)
def test_blocks_of_zeros(name: str) -> None:
    assert (round_trip(made(name), torch.zeros(200)) == 0).all()
    assert (round_trip(made(name), torch.full((200,), -0.0)) == 0).all()


@pytest.mark.parametrize("name", NEAREST + SPARSE + TWO_BITS)
def test_the_size_of_chunks_changes_no_byte(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(13_003)
    expected = encoded(made(name), x)
    for chunk in (1, 100, 1000):
        for module in (quantize, two_bits):
            monkeypatch.setattr(module, "CHUNK", chunk)
        monkeypatch.setattr(quantize, "SELECTION_CHUNK", chunk)
        monkeypatch.setattr(two_bits, "ROWS", 1)
        assert torch.equal(encoded(made(name), x), expected)
        assert torch.equal(decoded(made(name), expected, 13_003), round_trip(made(name), x))


@pytest.mark.parametrize("name", NEAREST + SPARSE + TWO_BITS)
def test_the_number_of_threads_changes_no_byte(name: str) -> None:
    codec, x = made(name), normal(200_003)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = encoded(codec, x)
        torch.set_num_threads(4)
        assert torch.equal(encoded(codec, x), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", [*TWO_BITS, "sparseloco", "sparseloco:density=0.3,decay=1"])
def test_a_tensor_that_is_cut_into_whole_blocks_has_the_same_codes(name: str) -> None:
    codec, x = made(name), normal(7 * 4096 * 7 + 100)
    whole = decoded(codec, encoded(codec, x), x.numel())
    for shards in (2, 3, 4):
        size = math.ceil(x.numel() / shards / codec.alignment) * codec.alignment
        parts = [decoded(codec, encoded(codec, part), part.numel()) for part in torch.split(x, size)]
        assert torch.equal(torch.cat(parts), whole)
        heads = [4 * math.ceil(part.numel() / codec.alignment) for part in torch.split(x, size)]
        levels = [encoded(codec, part)[:head] for part, head in zip(torch.split(x, size), heads, strict=True)]
        assert torch.equal(torch.cat(levels), encoded(codec, x)[: sum(heads)])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("numel", [0, 1, 5, 129, 70_001])
def test_the_residual_on_the_way_is_what_decoding_leaves_out(name: str, numel: int) -> None:
    codec, x = made(name), normal(numel, scale=1.0)
    expected = encoded(codec, x, seed=3)
    code, residual, spare = torch.empty_like(expected), torch.empty(numel), torch.empty(numel)
    codec.encode_with_residual(x, code, residual=residual, spare=spare, seed=3)
    assert torch.equal(code, expected)
    assert torch.equal(residual, x - decoded(codec, expected, numel))


@pytest.mark.parametrize("name", NEAREST + SPARSE + TWO_BITS)
def test_nothing_depends_on_the_values_of_a_device(name: str) -> None:
    # Tensors on "meta" have no data: reading one (a wait, on a GPU), or a shape that depends on data, raises.
    codec = made(name)
    values = torch.empty(1001, device="meta")
    data = torch.empty(codec.nbytes(1001), dtype=torch.uint8, device="meta")
    codec.encode(values, data)
    codec.decode(data, values)
    with pytest.raises(RuntimeError, match="meta"):
        values[0].item()


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_every_instruction_set_gives_the_same_bytes(capability: str) -> None:
    code = (
        "import torch; from tests.unit.test_codec import ALL, fingerprint;"
        "print(torch.backends.cpu.get_cpu_capability(), fingerprint(ALL))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found, digest = result.stdout.split()
    assert found == "DEFAULT" or capability != "default", "torch took the instruction set that was asked for"
    assert digest == fingerprint(ALL)


@pytest.mark.parametrize("name", ALL)
def test_a_buffer_of_another_length_raises(name: str) -> None:
    codec = made(name)
    x = normal(100)
    for size in (0, codec.nbytes(100) - 1, codec.nbytes(100) + 1):
        data = torch.zeros(size, dtype=torch.uint8)
        with pytest.raises(ConfigError, match="nbytes"):
            codec.encode(x, data)
        with pytest.raises(ConfigError, match="nbytes"):
            codec.decode(data, x)


# bf16 and fp16


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@settings(max_examples=200, deadline=None)
@given(values=vectors)
def test_casts_are_torchs_casts_and_saturate(name: str, dtype: torch.dtype, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    limit = torch.finfo(dtype).max
    cast = x.to(dtype)
    expected = torch.where(cast.isinf(), torch.full_like(cast, limit) * x.sign().to(dtype), cast)
    data = encoded(made(name), x)
    assert torch.equal(data, expected.view(torch.uint8))
    result = decoded(made(name), data, len(values))
    assert torch.equal(result.view(torch.int32), expected.float().view(torch.int32))
    unit, smallest = (2**-8, 2.0**-134) if name == "bf16" else (2**-11, 2.0**-25)
    inside = np.abs(exact(x)) <= limit
    error = np.abs(exact(result) - exact(x))[inside]
    assert (error <= np.maximum(unit * np.abs(exact(x)[inside]), smallest)).all()


def test_fp16_against_numpy() -> None:
    x = torch.cat([normal(10_000, scale=10.0), normal(10_000, scale=1e-6), torch.tensor([65503.0, 65519.0, -65504.0])])
    assert encoded(made("fp16"), x).numpy().tobytes() == x.numpy().astype("<f2").tobytes()
    assert round_trip(made("fp16"), torch.tensor([65520.0, -3e38, 1e5])).tolist() == [65504.0, -65504.0, 65504.0]


# int8 and int4


def check_blockwise(codec: Blockwise, x: torch.Tensor, seed: int = 0) -> None:
    data = encoded(codec, x, seed)
    steps, whole = parts_of(codec, data, x.numel())
    result, values = exact(decoded(codec, data, x.numel())), exact(x)
    levels = 2 ** (codec.bits - 1) - 1
    assert (np.abs(whole) <= levels).all()
    largest = float(np.abs(values).max(initial=0.0))
    saturated = np.clip(values, -(2.0**128 - 2.0**119), 2.0**128 - 2.0**119)
    for index, place in enumerate(blocks(x.numel(), codec.block)):
        step, ideal = steps[index], float(np.abs(saturated[place]).max()) / levels
        assert step * (1 + 2**-22) >= ideal
        if codec.scale == "fp32":
            assert step <= ideal * (1 + 2**-23) + 2.0**-120
        else:
            assert step <= 1.001 * ideal + 2.0**-41 * max(largest, 2.0**-75)
        ratio = (x.numpy()[place] / np.float32(step)).astype(np.float64)
        if codec.rounding == "nearest":
            assert (whole[place] == np.rint(ratio)).all()
        else:
            inside = np.clip(ratio, -levels, levels)
            assert (np.abs(whole[place] - inside) < 1 + 2**-15).all()
        product = (whole[place] * step).astype(np.float32)
        assert (product == result[place]).all(), "one rounding at most"
        half = 0.5 if codec.rounding == "nearest" else 1.0
        assert (np.abs(result[place] - values[place]) <= half * step * (1 + 2**-15)).all()


@pytest.mark.parametrize("name", BLOCKWISE)
@settings(max_examples=100, deadline=None)
@given(values=vectors, seed=st.integers(0, 2**32))
def test_blockwise_keeps_its_contract(name: str, values: list[float], seed: int) -> None:
    codec = made(name)
    assert isinstance(codec, Blockwise)
    check_blockwise(codec, torch.tensor(values, dtype=torch.float32), seed)


@pytest.mark.parametrize("name", BLOCKWISE)
def test_blockwise_over_chunks_and_magnitudes(name: str) -> None:
    codec = made(name)
    assert isinstance(codec, Blockwise)
    check_blockwise(codec, normal(70_001, scale=1e-6))
    spread = normal(20_000, scale=1.0) * torch.logspace(-37, 37, 20_000)
    check_blockwise(codec, spread)
    check_blockwise(codec, torch.full((64,), LARGEST))


@settings(max_examples=100, deadline=None)
@given(block=st.integers(1, 80), numel=st.integers(0, 400), bits=st.sampled_from([8, 4]), seed=st.integers(0, 9))
def test_any_block_and_any_length(block: int, numel: int, bits: int, seed: int) -> None:
    check_blockwise(Blockwise(bits, block), normal(numel, seed))


def test_the_bound_of_the_issue() -> None:
    x = normal(100_000)
    for bits, levels in ((8, 127), (4, 7)):
        error = np.abs(exact(round_trip(Blockwise(bits), x)) - exact(x))
        for place in blocks(x.numel(), 64):
            assert error[place].max() <= np.abs(exact(x)[place]).max() / (2 * levels) * 1.0011


def test_int4_packs_two_blocks_into_the_bytes_of_one() -> None:
    codec = made("int4:block=2,scale=fp32")
    x = torch.tensor([7.0, 3.0, -7.0, 1.0, -7.0, 5.0, 7.0])
    data = encoded(codec, x)
    assert data[:16].view(torch.float32).tolist() == [1.0] * 4
    # 7 and -7, 3 and 1; what is left over is paired half with half, the odd one stays alone.
    assert data[16:].view(torch.int8).tolist() == [7 - 16 * 7, 3 + 16 * 1, -7 + 16 * 7, 5]
    assert round_trip(codec, x).tolist() == x.tolist()
    x = torch.tensor([7.0, -7.0, 1.0, -1.0, 0.0, 5.0, -3.0])
    data = encoded(made("int4:scale=fp32"), x)
    assert data[4:].view(torch.int8).tolist() == [7, -7 + 16 * 5, 1 - 16 * 3, -1]


def test_scales_reach_beyond_fp16() -> None:
    # What one training step changes: steps of 1e-10 would all be 0 in plain fp16, and 1e30 would be infinite.
    for magnitude in (1e-20, 1e-9, 1e30):
        x = normal(6400, scale=magnitude)
        assert (round_trip(made("int8"), x) - x).norm() <= 0.01 * x.norm()
    mixed = torch.cat([normal(64, scale=1e-8), normal(64, scale=1.0), torch.zeros(64)])
    result = round_trip(made("int8"), mixed)
    assert (result - mixed)[:64].norm() <= 0.01 * mixed[:64].norm()


@pytest.mark.parametrize("name", ["int8", "int4", "int8:block=7", "bf16", "fp16", "topk:0.1", "topk:0.1,value=fp16"])
@settings(max_examples=60, deadline=None)
@given(values=st.lists(alike.map(lambda x: x if abs(x) > 1e-4 else 0.0), max_size=200))
def test_what_was_decoded_encodes_to_itself(name: str, values: list[float]) -> None:
    codec = made(name)
    once = round_trip(codec, torch.tensor(values, dtype=torch.float32))
    assert torch.equal(round_trip(codec, once), once)


def test_signs_are_treated_alike() -> None:
    x = normal(1000)
    for name in NEAREST:
        assert torch.equal(round_trip(made(name), -x), -round_trip(made(name), x))


# Stochastic rounding


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    codec = made(name)
    assert isinstance(codec, Blockwise)
    x = normal(640, seed=5)
    draws = 400
    steps, _ = parts_of(codec, encoded(codec, x), x.numel())
    step = np.repeat(steps, codec.block)[: x.numel()]
    mean = sum(exact(round_trip(codec, x, seed)) for seed in range(draws)) / draws
    assert (np.abs(mean - exact(x)) <= 5 * step / 2 / math.sqrt(draws)).all()
    part = exact(x) / step % 1.0
    variance = (step**2 * part * (1 - part)).sum() / draws
    assert abs((mean - exact(x)).sum()) <= 5 * math.sqrt(variance)
    nearest = exact(round_trip(Blockwise(codec.bits, codec.block, codec.scale), x))
    assert np.abs(mean - exact(x)).sum() < 0.3 * np.abs(nearest - exact(x)).sum(), "closer than any single rounding"


@pytest.mark.parametrize("name", STOCHASTIC)
def test_noise_comes_from_the_seed_alone(name: str) -> None:
    codec, x = made(name), normal(3000)
    first = encoded(codec, x, seed=11)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    assert torch.equal(encoded(codec, x, seed=11), first)
    assert torch.equal(torch.get_rng_state(), state)
    for other in (12, 11 + 2**32, 11 + 2**40):
        assert not torch.equal(encoded(codec, x, seed=other), first), "all bits of the seed count"


def test_noise_differs_between_values_and_chunks() -> None:
    x = torch.full((2**17 + 100,), 0.5)
    x[::64] = 127.0
    result = round_trip(Blockwise(8, 64, "fp32", "stochastic"), x)
    up = (result.view(-1)[: 2**17] == 1).view(2, -1)
    assert not torch.equal(up[0], up[1])
    rest = result[(x == 0.5)]
    assert set(rest.tolist()) == {0.0, 1.0}
    assert abs(rest.mean().item() - 0.5) <= 5 * 0.5 / math.sqrt(rest.numel())


def test_whole_multiples_are_not_rounded_at_random() -> None:
    x = torch.arange(-127.0, 128.0).repeat(40)
    for seed in range(20):
        assert torch.equal(round_trip(Blockwise(8, 255, "fp32", "stochastic"), x, seed), x)


# Top-k


@settings(max_examples=150, deadline=None)
@given(
    values=st.one_of(vectors, st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0]), max_size=120)),
    density=st.sampled_from(["0.01", "0.1", "0.5", "0.99", "1"]),
)
def test_top_k_keeps_exactly_the_largest_and_of_ties_the_first(values: list[float], density: str) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    codec = made(f"topk:{density}")
    count = math.ceil(Fraction(density) * len(values))
    order = sorted(range(len(values)), key=lambda place: (-abs(float(x[place])), place))
    kept = sorted(order[:count])
    data = encoded(codec, x)
    assert np.frombuffer(data.numpy().tobytes()[: 4 * count], "<i4").tolist() == kept
    expected = torch.zeros_like(x)
    expected[kept] = x[kept]
    assert torch.equal(decoded(codec, data, len(values)), expected)


@pytest.mark.parametrize("density", ["0.01", "0.3", "1"])
@pytest.mark.parametrize("order", ["random", "rising", "falling", "equal"])
def test_top_k_over_chunks(density: str, order: str) -> None:
    x = normal(600_000, scale=1.0)
    x = {"random": x, "rising": x.sort().values, "falling": x.sort(descending=True).values, "equal": x.sign()}[order]
    count = math.ceil(Fraction(density) * x.numel())
    magnitude = np.abs(x.numpy())
    kept = np.sort(np.argsort(-magnitude, kind="stable")[:count])
    data = encoded(made(f"topk:{density}"), x)
    assert (np.frombuffer(data.numpy().tobytes()[: 4 * count], "<i4") == kept).all()


def test_top_k_in_fp16_saturates() -> None:
    x = torch.tensor([1e-3, -1e9, 3.0, 0.1])
    assert round_trip(made("topk:0.5,value=fp16"), x).tolist() == [0.0, -65504.0, 3.0, 0.0]


# Two bits a value


def levels_of(raw: bytes) -> Floats:
    """Read pairs of bf16 numbers."""
    words = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
    return words.view(np.float32).astype(np.float64).reshape(-1, 2)


def two_bits_of(raw: bytes, count: int) -> npt.NDArray[np.int64]:
    """Read numbers from 0 to 3: a quarter of them in each pair of bits."""
    packed = np.frombuffer(raw, np.uint8)
    return np.concatenate([(packed >> shift) & 3 for shift in (0, 2, 4, 6)])[:count].astype(np.int64)


def places_of(raw: bytes, count: int) -> npt.NDArray[np.int64]:
    """Read numbers of 12 bits: the lower 8 of each, then the upper 4 of those of both halves."""
    packed = np.frombuffer(raw, np.uint8).astype(np.int64)
    upper = np.concatenate([packed[count:] & 15, packed[count:] >> 4])[:count]
    return packed[:count] + 256 * upper


def check_magnitudes(x: Floats, codes: npt.NDArray[np.int64], levels: Floats) -> Floats:
    """Check which of two magnitudes each value of a block has; return the values that the codes stand for."""
    magnitude, is_large = np.abs(x), codes >= 2
    top = magnitude.max()
    assert (codes % 2 == (x < 0)).all()
    for chosen, level in zip((~is_large, is_large), levels, strict=True):
        if chosen.any() and top > 1e-30:
            assert abs(magnitude[chosen].mean() - level) <= level * 2**-8 + top / 4000
    near = np.abs(magnitude - magnitude.mean()) <= top / 2000
    assert (near | (is_large == (magnitude > magnitude.mean()))).all() or top <= 1e-30
    result: Floats = np.where(is_large, levels[1], levels[0]) * np.where(x < 0, -1, 1)
    return result


@settings(max_examples=100, deadline=None)
@given(values=vectors, block=st.sampled_from([1, 7, 64]))
def test_two_bits_are_a_sign_and_one_of_two_means(values: list[float], block: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    codec = TwoBits(block)
    data = encoded(codec, x)
    raw, count = data.numpy().tobytes(), math.ceil(len(values) / block)
    levels, codes = levels_of(raw[: 4 * count]), two_bits_of(raw[4 * count :], len(values))
    result = exact(decoded(codec, data, len(values)))
    for index, place in enumerate(blocks(len(values), block)):
        expected = check_magnitudes(exact(x)[place], codes[place], levels[index])
        assert np.allclose(result[place], expected, rtol=1e-6, atol=0)


def test_two_bits_leave_an_eighth_of_the_squares_out() -> None:
    x = normal(100_000)
    for name, most in (("int2", 0.121), ("int2:block=128", 0.124)):
        assert (round_trip(made(name), x) - x).square().sum() <= most * x.square().sum()


ties = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0]), max_size=120)


@settings(max_examples=150, deadline=None)
@given(values=st.one_of(vectors, ties), density=st.sampled_from(["0.015625", "0.1", "0.5", "1"]))
def test_sparse_blocks_keep_the_largest_and_of_ties_the_first(values: list[float], density: str) -> None:
    check_sparse(made(f"sparseloco:density={density}"), torch.tensor(values, dtype=torch.float32), Fraction(density))


@pytest.mark.parametrize("numel", [4096, 8192, 12_289, 40_000])
def test_sparse_blocks_of_4096(numel: int) -> None:
    x = normal(numel)
    check_sparse(made("sparseloco"), x, Fraction(1, 64))
    check_sparse(made("sparseloco"), x.sign(), Fraction(1, 64))  # all are ties
    check_sparse(made("sparseloco"), torch.arange(float(numel)) % 50, Fraction(1, 64))


def check_sparse(codec: Codec, x: torch.Tensor, density: Fraction) -> None:
    data = encoded(codec, x)
    result = exact(decoded(codec, data, x.numel()))
    if x.numel() == 0:
        return
    kept = [math.ceil(density * (place.stop - place.start)) for place in blocks(x.numel(), 4096)]
    raw, total = data.numpy().tobytes(), sum(kept)
    head, middle = 4 * len(kept), math.ceil(1.5 * total)
    levels = levels_of(raw[:head])
    places, codes = places_of(raw[head : head + middle], total), two_bits_of(raw[head + middle :], total)
    start = 0
    for index, (place, count) in enumerate(zip(blocks(x.numel(), 4096), kept, strict=True)):
        values = exact(x)[place]
        order = sorted(range(len(values)), key=lambda at: (-abs(values[at]), at))[:count]
        top = abs(values[order[0]])
        sent = [at for at in order if abs(values[at]) >= top / 8000 and top > 1e-30]
        found, said = places[start : start + count], codes[start : start + count]
        assert found[: len(sent)].tolist() == sent, "falling, of equal ones the first"
        unsent = [at for at in range(len(values)) if at not in set(found.tolist())]
        assert (result[place][unsent] == 0).all()
        again = found[len(sent) :]
        assert all(at == found[0] or abs(values[at]) <= top / 8000 or top <= 1e-30 for at in again)
        if sent:
            expected = check_magnitudes(values[sent], said[: len(sent)], levels[index])
            assert np.allclose(result[place][sent], expected, rtol=1e-6, atol=0)
        start += count


def test_sparse_bytes_of_the_issue() -> None:
    for numel in (4096, 10_000, 2**20, 2**23 + 1):
        assert made("sparseloco").nbytes(numel) <= 0.008 * 4 * numel
    assert codec_ratio("sparseloco") == 116 / 16384
    assert (round_trip(made("sparseloco"), normal(8192)) != 0).sum() == 128


def test_a_residual_decays_before_it_is_added() -> None:
    x = torch.arange(1.0, 129.0)
    for decay in (1.0, 0.5):
        codec = SparseBlocks(1 / 64, decay)
        memory = ErrorFeedback(codec, 128, torch.float32, torch.device("cpu"))
        code, spare = torch.empty(codec.nbytes(128), dtype=torch.uint8), torch.empty(128)
        wanted = x.clone()
        for _ in range(3):
            values = x.clone()
            memory.encode(place=CodePlace(0, None), values=values, code=code, spare=spare, seed=0)
            assert torch.equal(values, wanted)
            wanted = x + decay * (wanted - decoded(codec, code, 128))
            memory.commit(None)


# Error feedback


@pytest.mark.parametrize(
    "name, contraction",
    [
        ("bf16", 2**-8),
        ("fp16", 2**-11),
        ("int8", 1 / 253),
        ("int4", 1 / 13.9),
        ("int8:scale=fp32", 1 / 253),
        ("int8:rounding=stochastic", 1 / 126),
        ("int4:rounding=stochastic", 1 / 6.9),
        ("topk:0.1", math.sqrt(0.9)),
        ("topk:0.1,value=fp16", math.sqrt(0.9) + 2**-11),
        ("sparseloco:density=0.1,decay=1", math.sqrt(0.95)),
        ("int2", math.sqrt(0.76)),
    ],
)
def test_error_feedback_converges(name: str, contraction: float) -> None:
    # Each error is at most `contraction` of what was encoded (in the largest value, top-k in the Euclidean norm), so
    # the residual stays below the geometric sum, and the mean of T messages is off by residual / T.
    codec, rounds = made(name), 200
    x = normal(2_000, scale=1.0)
    order = 2 if name.startswith(("topk", "sparse", "int2")) else math.inf
    bound = contraction / (1 - contraction) * torch.linalg.vector_norm(x, order).item()
    residual, total = torch.zeros_like(x), torch.zeros(2_000, dtype=torch.float64)
    for seed in range(rounds):
        wanted = x + residual
        sent = round_trip(codec, wanted, seed)
        residual = wanted - sent
        total += sent.double()
        assert torch.linalg.vector_norm(residual, order).item() <= bound
    error = torch.linalg.vector_norm(total / rounds - x.double(), order).item()
    assert error <= bound / rounds + 1e-5
    assert residual.abs().max() > 0


# Names


@pytest.mark.parametrize(
    "name, codec",
    [
        ("none", None),
        ("bf16", Cast("bf16")),
        ("fp16", Cast("fp16")),
        ("int8", Blockwise(8, 64, "fp16", "nearest")),
        ("int8:block=64", Blockwise(8)),
        ("int8:block=128,rounding=stochastic,scale=fp32", Blockwise(8, 128, "fp32", "stochastic")),
        ("int4:scale=fp16", Blockwise(4)),
        ("topk:0.01", TopK(0.01)),
        ("topk:1e-2", TopK(0.01)),
        ("topk:0.01,value=fp16", TopK(0.01, "fp16")),
        ("int2", TwoBits(64)),
        ("int2:block=128", TwoBits(128)),
        ("sparseloco", SparseBlocks(1 / 64, 0.95)),
        ("sparseloco:decay=1,density=0.03", SparseBlocks(0.03, 1.0)),
    ],
)
def test_names(name: str, codec: Codec | None) -> None:
    found = codec_of(name)
    assert found == codec
    if codec is not None:
        assert codec_of(codec) is codec
        assert codec_of(str(codec)) == codec
        assert hash(codec_of(str(codec))) == hash(codec)


def test_full_names() -> None:
    assert str(codec_of("int8")) == "int8:block=64"
    assert str(codec_of("int4:rounding=stochastic,scale=fp32")) == "int4:block=64,scale=fp32,rounding=stochastic"
    assert str(codec_of("topk:0.010")) == "topk:0.01"
    assert len({str(made(name)) for name in ALL}) == len(ALL)


@pytest.mark.parametrize(
    "name, words",
    [
        ("", "unknown"),
        ("int7", "give one of none"),
        ("INT8", "unknown"),
        ("int8 ", "unknown"),
        ("int8:", "option ''"),
        ("int8:blocks=64", "blocks=64"),
        ("int8:block", "option 'block'"),
        ("int8:block=64,block=64", "twice"),
        ("int8:block=0", "block must be an integer from 1 to 65536, got 0"),
        ("int8:block=-1", "'-1'"),
        ("int8:block=1.5", "'1.5'"),
        ("int8:block=", "block must be an integer from 1 to 65536, got ''"),
        ("int8:block=65537", "65536"),
        ("int8:scale=bf16", "scale must be one of 'fp16', 'fp32', got 'bf16'"),
        ("int8:rounding=up", "rounding must be one of 'nearest', 'stochastic', got 'up'"),
        ("int8:value=fp16", "block=..."),
        ("bf16:block=64", "give the codec without options"),
        ("none:block=64", "give the codec without options"),
        ("topk", "density"),
        ("topk:", "density"),
        ("topk:0", "at most 1, got '0'"),
        ("topk:1.01", "at most 1"),
        ("topk:-0.5", "above 0"),
        ("topk:nan", "density"),
        ("topk:many", "'many'"),
        ("topk:value=fp16", "density"),
        ("topk:0.1,value=bf16", "value must be one of 'fp32', 'fp16', got 'bf16'"),
        ("topk:0.1,block=3", "value=..."),
        ("int2:block=4097", "from 1 to 4096"),
        ("int2:scale=fp16", "block=..."),
        ("sparseloco:0.1", "density=... or decay=..."),
        ("sparseloco:density=0", "must be a number"),
        ("sparseloco:density=many", "'many'"),
        ("sparseloco:decay=1.5", "<= 1"),
        ("sparseloco:decay=1,decay=1", "twice"),
        (8, "neither a name nor a Codec"),
        (None, "neither a name nor a Codec"),
    ],
)
def test_names_that_cannot_be_meant(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        codec_of(name)
    assert words in str(caught.value)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cast("fp32"),
        lambda: Blockwise(3),
        lambda: Blockwise(8, 0),
        lambda: Blockwise(8, True),
        lambda: Blockwise(8, 1.5),  # type: ignore[arg-type]
        lambda: Blockwise(8, 2**16 + 1),
        lambda: Blockwise(8, scale="fp64"),
        lambda: Blockwise(8, rounding="down"),
        lambda: TopK(0.0),
        lambda: TopK(1.5),
        lambda: TopK(float("nan")),
        lambda: TopK(0.1, "int8"),
        lambda: TwoBits(4097),
        lambda: SparseBlocks(0.0),
        lambda: SparseBlocks(0.1, -0.5),
    ],
)
def test_parameters_that_cannot_be_meant(make: object) -> None:
    assert callable(make)
    with pytest.raises(ConfigError):
        make()


def test_what_a_saved_memory_says_of_results_is_read() -> None:
    """In saved states the result that a cell combined has the number -1, beside those of the parts for each cell."""
    state = {"reference": torch.zeros(8), "left 0 -1": torch.ones(4), "left 0 1": torch.full((4,), 2.0)}
    memory = ErrorFeedback(made("bf16"), 8, torch.float32, torch.device("cpu"))
    memory.load_state_dict(state)
    saved = memory.state_dict()
    assert saved.keys() == state.keys() and all(torch.equal(saved[name], state[name]) for name in state)
    code, spare = torch.empty(8, dtype=torch.uint8), torch.empty(4)
    values = torch.zeros(4)
    memory.encode(place=CodePlace(0, None), values=values, code=code, spare=spare, seed=0)
    assert values.tolist() == [1.0] * 4, "what was left is added"


# GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ALL)
def test_cpu_and_gpu_give_the_same_bytes(name: str) -> None:
    codec = made(name)
    for magnitude in (1e-30, 1e-6, 1.0, 3e37):
        x = normal(200_003, scale=magnitude)
        here = encoded(codec, x, seed=4)
        values, data = x.cuda(), torch.empty(here.numel() + 1, dtype=torch.uint8, device="cuda")[1:]
        back = torch.empty_like(values)
        torch.cuda.set_sync_debug_mode("error")
        try:
            codec.encode(values, data, 4)
            codec.decode(data, back)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if name not in STOCHASTIC:
            assert torch.equal(data.cpu(), here)
        assert torch.equal(back.cpu(), decoded(codec, data.cpu(), x.numel()))
