"""What is forecast for the inside of a cell: memory of a rank, traffic of a step, and pictures of its mesh."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decoder import Decoder
from xffl.errors import ConfigError
from xffl.parallel.axes.pipeline import split_model
from xffl.planning import mesh_figure, mesh_text, rank_memory, step_traffic
from xffl.planning.memory import Amount, ModelSize, TrainingSize, form_of, share_of, total_bytes
from xffl.planning.mesh import MESH_AXES, Grid

PLAIN = ModelSize(parameters=1e9)
LLAMA = ModelSize(parameters=8.03e9, layers=32, width=4096, vocabulary=128_256, kv_width=1024)
FP32 = TrainingSize()
MIXED = TrainingSize(param_dtype="bfloat16", batch=2, sequence=4096)

meshes = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in MESH_AXES})


def by_name(parts: tuple[Amount, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        assert part.bytes is not None
        found[part.what] = found.get(part.what, 0.0) + part.bytes
    return found


# Memory ---------------------------------------------------------------------------------------------------------------


def test_adam_in_float32_takes_sixteen_bytes_a_parameter() -> None:
    for axes in ({}, {"dp_replicate": 8}):
        assert by_name(rank_memory(axes, PLAIN, FP32)) == {
            "parameters": 4e9,
            "gradients": 4e9,
            "optimizer": 8e9,
            "gathered": 0,
        }
    assert total_bytes(rank_memory({}, PLAIN, FP32)) == 16e9


@pytest.mark.parametrize(("optimizer", "values"), [("sgd", 0), ("momentum", 1), ("adamw", 2)])
def test_the_optimizers_state(optimizer: str, values: int) -> None:
    held = by_name(rank_memory({"dp_shard": 4}, PLAIN, TrainingSize(optimizer=optimizer, dtype="bfloat16")))
    assert held["optimizer"] == values * held["parameters"] == values * 2e9 / 4


def test_adafactor_needs_whole_matrices_and_their_width() -> None:
    training = TrainingSize(optimizer="adafactor")
    assert by_name(rank_memory({}, LLAMA, training))["optimizer"] == pytest.approx(8.03e9 * 4 * 2 / 4096)
    assert total_bytes(rank_memory({"dp_replicate": 2}, PLAIN, training)) is None
    for axes, zero in (({"dp_shard": 2}, 0), ({"tp": 2}, 0), ({"cp": 2}, 0), ({"dp_shard": 2}, 1)):
        with pytest.raises(ConfigError, match="adafactor"):
            rank_memory(axes, LLAMA, training, zero=zero)


@given(meshes)
def test_ranks_of_a_replica_hold_the_model_together(axes: dict[str, int]) -> None:
    """Of a model without parts that differ, each rank of a replica has the same."""
    held = by_name(rank_memory(axes, PLAIN, FP32))
    replica = prod(axes.values()) // axes["dp_replicate"]
    assert held["parameters"] * replica == pytest.approx(4e9)


@given(meshes, st.integers(4, 40))
def test_stages_and_parts_of_layers_hold_at_least_their_share(axes: dict[str, int], layers: int) -> None:
    model = ModelSize(parameters=2e7, layers=layers, width=64, vocabulary=1000)
    share = share_of(axes, model)
    assert share.whole == pytest.approx(share.root + share.layers * share.layer)
    assert share.whole >= model.parameters / axes["pp"] / axes["tp"] * 0.999
    if axes["pp"] == axes["tp"] == 1:
        assert share.whole == pytest.approx(model.parameters)


@pytest.mark.parametrize(("layers", "stages"), [(4, 2), (4, 3), (5, 3), (32, 4), (7, 7), (2, 1)])
def test_stages_are_those_of_the_pipeline(layers: int, stages: int) -> None:
    model = ModelSize(parameters=1e6, layers=layers)
    counts = [len(split_model(Decoder(8, 2, layers), stage, stages).layers) for stage in range(stages)]
    assert share_of({"pp": stages}, model).layers == max(counts)
    with pytest.raises(ConfigError, match="cannot share"):
        share_of({"pp": layers + 1}, model)


def test_what_fsdp_gathers() -> None:
    layer, root = LLAMA.layer, LLAMA.first + LLAMA.last
    assert layer == pytest.approx((8.03e9 - root) / 32)
    gathered = by_name(rank_memory({"dp_shard": 8}, LLAMA, MIXED))["gathered"]
    assert gathered == pytest.approx((root + 2 * layer) * 2 + root * (2 + 4))
    kept = TrainingSize(param_dtype="bfloat16", reshard_after_forward=False)
    assert by_name(rank_memory({"dp_shard": 8}, LLAMA, kept))["gathered"] == pytest.approx(8.03e9 * 2 + root * 6)
    assert by_name(rank_memory({"dp_shard": 8}, PLAIN, FP32))["gathered"] == pytest.approx(1e9 * (4 + 4))
    assert by_name(rank_memory({}, PLAIN, MIXED))["gathered"] == 2e9  # what autocast has cast


def test_ddp_holds_its_gradients_twice_unless_they_are_views() -> None:
    training = TrainingSize(gradient_as_bucket_view=False)
    assert by_name(rank_memory({"dp_replicate": 2}, PLAIN, training))["gathered"] == 4e9


def test_zero_cuts_states_then_gradients_then_weights() -> None:
    """Rajbhandari et al., 2020, figure 1: 7.5e9 parameters, 64 ranks, mixed precision with Adam (K = 12)."""
    model = ModelSize(parameters=7.5e9)
    training = TrainingSize(param_dtype="bfloat16")
    paper = {1: 31.4e9, 2: 16.6e9, 3: 1.9e9}
    for zero, total in paper.items():
        held = by_name(rank_memory({"dp_shard": 64}, model, training, zero=zero))
        assert sum(held.values()) - held["gathered"] == pytest.approx(total, rel=0.02)


@pytest.mark.parametrize(
    ("options", "bytes_each"),
    [({}, 4), ({"atomic": False}, 0), ({"codec": True}, 4 + 12), ({"server": True}, 4 + 4)],
)
def test_what_a_round_keeps(options: dict[str, bool], bytes_each: int) -> None:
    held = by_name(rank_memory({"dp_shard": 2}, PLAIN, FP32, is_federated=True, **options))
    assert held["round"] == bytes_each * 1e9 / 2
    assert "round" not in by_name(rank_memory({"dp_shard": 2}, PLAIN, FP32, **options))


# Traffic --------------------------------------------------------------------------------------------------------------


def test_tensor_parallel_ranks_hold_a_part_of_the_layers() -> None:
    small, whole = ModelSize(parameters=4 * 1220 + 2010, layers=4, width=10, vocabulary=100), TrainingSize()
    share = share_of({"tp": 4}, small)
    assert (share.layer, share.root, share.whole) == (320, 250 + 260, 4 * 320 + 510)
    assert by_name(rank_memory({"tp": 4}, small, whole))["gradients"] == (1790 + 750) * 4
    assert by_name(rank_memory({"tp": 4, "dp_shard": 2}, small, whole))["gradients"] == 1790 / 2 * 4


def test_values_of_two_bytes() -> None:
    small, low = ModelSize(parameters=1220 + 2010, layers=1, width=10, vocabulary=100), TrainingSize(dtype="bfloat16")
    assert by_name(rank_memory({"dp_shard": 2}, small, low))["gathered"] == (2010 + 1220) * 2 + 2010 * (2 + 2)
    served = rank_memory({"dp_shard": 2}, PLAIN, low, is_federated=True, server=True)
    assert by_name(served)["round"] == (2 + 4) * 1e9 / 2
    assert by_name(rank_memory({"dp_shard": 2}, PLAIN, low, zero=1, is_federated=True))["round"] == 4 * 1e9 / 2
    cut = [by_name(rank_memory({"dp_shard": 4}, ModelSize(parameters=4e9), low, zero=stage)) for stage in (1, 2, 3)]
    assert [found["parameters"] for found in cut] == [8e9, 8e9, 2e9]
    assert [found["gradients"] for found in cut] == [8e9, 2e9, 2e9]
    assert [found["gathered"] for found in cut] == [0, 0, 2e9]


def test_traffic_of_gradients_and_weights() -> None:
    assert step_traffic({}, PLAIN, FP32) == ()
    for training in (FP32, MIXED):  # DDP sums gradients in the parameters' own type
        assert by_name(step_traffic({"dp_replicate": 4}, PLAIN, training)) == {"dp_replicate": 2 * 3 / 4 * 4e9}
    assert by_name(step_traffic({"dp_shard": 4}, PLAIN, FP32)) == {"dp_shard, cp": 2 * 3 / 4 * 4e9}
    for zero, passes in ((1, 2), (2, 2), (3, 3)):
        moved = by_name(step_traffic({"dp_shard": 4}, PLAIN, FP32, zero=zero))
        assert moved == {"dp_shard": passes * 3 / 4 * 4e9}
    hybrid = by_name(step_traffic({"dp_replicate": 2, "dp_shard": 4}, PLAIN, FP32))
    assert hybrid["dp_replicate"] == 2 * 1 / 2 * 4e9 / 4


def test_layers_are_gathered_twice_and_the_root_once() -> None:
    layers, root = 32 * LLAMA.layer, LLAMA.first + LLAMA.last
    weights, gradients = step_traffic({"dp_shard": 8}, LLAMA, MIXED)
    assert weights.bytes == pytest.approx(7 / 8 * (root + 2 * layers) * 2)
    assert gradients.bytes == pytest.approx(7 / 8 * LLAMA.parameters * 4)
    in_pieces = replace(MIXED, micro_batches=4)  # which only stages of a pipeline take one by one
    assert step_traffic({"dp_shard": 8}, LLAMA, in_pieces)[0].bytes == weights.bytes


@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_activations_need_batch_sequence_and_width(axis: str) -> None:
    moved = {part.what: part for part in step_traffic({axis: 2}, LLAMA, TrainingSize())}
    assert moved[axis].bytes is None and moved[axis].formula and total_bytes(tuple(moved.values())) is None
    assert by_name(step_traffic({axis: 2}, LLAMA, MIXED))[axis] > 0


def test_activations_shrink_with_the_part_of_the_sequence() -> None:
    alone = by_name(step_traffic({"tp": 2}, LLAMA, MIXED))["tp"]
    assert by_name(step_traffic({"tp": 2, "cp": 2}, LLAMA, MIXED))["tp"] == pytest.approx(alone / 2)
    whole = by_name(step_traffic({"pp": 2}, LLAMA, MIXED))["pp"]
    assert whole == 2 * 4096 * 4096 * 2
    assert by_name(step_traffic({"pp": 4}, LLAMA, MIXED))["pp"] == 2 * whole
    assert by_name(step_traffic({"pp": 2, "tp": 2}, LLAMA, MIXED))["pp"] == whole / 2
    keys = by_name(step_traffic({"cp": 4}, LLAMA, MIXED))["cp"]
    assert keys == pytest.approx(3 / 4 * 2 * 4096 * 32 * 2 * 1024 * (2 + 4))
    assert by_name(step_traffic({"cp": 4, "tp": 2}, LLAMA, MIXED))["cp"] == keys / 2


WRONG: list[tuple[type, dict[str, Any], str]] = [
    (ModelSize, {"parameters": 0}, "parameters must be a number > 0, got 0"),
    (ModelSize, {"parameters": float("nan")}, "parameters must be a number > 0, got nan"),
    (ModelSize, {"parameters": True}, "parameters must be a number > 0, got True"),
    (ModelSize, {"parameters": 1e9, "layers": 0}, "layers must be a positive integer, got 0"),
    (ModelSize, {"parameters": 1e9, "width": 1.5}, "width must be a positive integer, got 1.5"),
    (ModelSize, {"parameters": 1e9, "vocabulary": 100}, "give the width, too"),
    (ModelSize, {"parameters": 1e6, "vocabulary": 1000, "width": 1000}, "have more than the model's"),
    (TrainingSize, {"dtype": "float8"}, "dtype must be one of 'float32', 'bfloat16', 'float16', got 'float8'"),
    (TrainingSize, {"param_dtype": "half"}, "param_dtype must be one of"),
    (TrainingSize, {"optimizer": "adam"}, "got 'adam' (did you mean 'adamw'?)"),
    (TrainingSize, {"batch": -1}, "batch must be a positive integer, got -1"),
]


@pytest.mark.parametrize(("kind", "options", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_numbers(kind: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        kind(**options)


# Pictures -------------------------------------------------------------------------------------------------------------


@given(meshes, st.integers(0, 5))
def test_ranks_are_counted_as_the_mesh_counts_them(axes: dict[str, int], first: int) -> None:
    import torch

    grid = Grid(axes, first)
    mesh = torch.arange(first, first + prod(axes.values())).reshape([axes[axis] for axis in MESH_AXES])
    assert [[grid.rank(row, column) for column in range(grid.columns)] for row in range(grid.rows)] == mesh.reshape(
        grid.rows, grid.columns
    ).tolist()


def test_a_mesh_as_text() -> None:
    lines = mesh_text({"pp": 2, "dp_shard": 2, "tp": 2}, first_rank=8, cell=1, width=60).splitlines()
    assert lines[0] == "Mesh of cell 1: pp 2 x dp_shard 2 x tp 2"
    assert [line.split() for line in lines[1:]] == [
        ["dp_shard", "0", "0", "1", "1"],
        ["tp", "0", "1", "0", "1"],
        ["pp", "0", "8", "9", "10", "11"],
        ["pp", "1", "12", "13", "14", "15"],
    ]
    assert mesh_text({}, width=60).splitlines()[1].split() == ["rank", "0"]


@pytest.mark.parametrize("axes", [{"dp_replicate": 64, "dp_shard": 64}, {"tp": 8, "dp_shard": 512}, {"pp": 100}])
@pytest.mark.parametrize("width", [40, 61, 120])
def test_a_large_mesh_fits_and_says_what_is_left_out(axes: dict[str, int], width: int) -> None:
    text = mesh_text(axes, width=width)
    assert max(map(len, text.splitlines())) <= width and len(text.splitlines()) < 16 and text.isascii()
    assert re.search(r"\.\.\. \d+ more (row|column)s", text)


@pytest.mark.parametrize("axes", [{"dq": 2}, {"tp": 0}, {"tp": 1.5}, {"tp": True}])
def test_a_wrong_mesh(axes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="axis"):
        mesh_text(axes)


def test_a_mesh_as_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    axes = {"pp": 2, "cp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2}
    mesh_figure(axes, tmp_path / "one.svg", cells=3)
    mesh_figure(axes, tmp_path / "two.svg", cells=3)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    words = ["".join(node.itertext()).strip() for node in ET.parse(tmp_path / "one.svg").iter() if "text" in node.tag]
    assert {str(rank) for rank in range(32)} | set(axes) | {"federated", "cell 0"} <= set(words)
    mesh_figure({"dp_replicate": 99, "dp_shard": 99}, tmp_path / "large.png")
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        mesh_figure(axes, tmp_path / "x.pdf")


def test_forms_are_those_of_the_spreading() -> None:
    cases = {"plain": [{}, {"pp": 2}, {"tp": 2}], "ddp": [{"dp_replicate": 2}, {"pp": 2, "dp_replicate": 2}]}
    cases["fsdp"] = [{"dp_shard": 2}, {"cp": 2}, {"dp_replicate": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}]
    for form, found in cases.items():
        assert {form_of(axes) for axes in found} == {form}
