"""Checkpoints saved right after a round load into other numbers of cells; what each rank keeps loads only at home."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import xffl
from tests.decoder import Decoder
from tests.kept import Own
from tests.ranks.test_checkpoint import Kit, assert_same, make_state
from tests.worlds import run_world
from xffl.checkpoint import consolidate_checkpoint, load_checkpoint, save_checkpoint
from xffl.distributed.distributed_state import DistributedState


def small(seed: int) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(width=16, heads=2, layers=1)


def kit_of(state: DistributedState | None, seed: int = 1) -> Kit:
    return Kit(state, seed, make=small)


def truth_of(kit: Kit) -> dict[str, Any]:
    """Everything as it is now: a plain model's state dict goes on changing."""
    return copy.deepcopy(kit.truth())


def next_step(kit: Kit, place: int, places: int) -> dict[str, Any]:
    """Step on the same global batch, however many ranks share it."""
    kit.train(range(7, 8), place, places)
    return truth_of(kit)["model"]


def saves(rank: int, world_size: int, folder: str) -> tuple[Any, Any]:
    """Train two cells on the same batches, as if a round had come, and save; then also make them differ."""
    state = make_state(rank, "cells", (2, 2), 2)
    kit, own = kit_of(state), {"own": Own([rank, torch.full((3,), float(rank))])}
    kit.train(range(2), rank % 2, 2)
    save_checkpoint(f"{folder}/good", kit.parts(), state, values={"step": 2}, own=own, after_round=True)
    truth = truth_of(kit)
    stepped = next_step(kit, rank % 2, 2)
    found = Own(None)
    load_checkpoint(f"{folder}/good", kit.parts(), state, own={"own": found})
    assert found.value[0] == rank and found.value[1].tolist() == [rank] * 3
    assert_same(truth_of(kit), truth)
    kit.train(range(8, 9), rank, world_size)  # each cell on its part
    save_checkpoint(f"{folder}/lying", kit.parts(), state, after_round=True)
    save_checkpoint(f"{folder}/between", kit.parts(), state)
    own_elsewhere(rank, folder, kit, own)
    return truth, stepped


def own_elsewhere(rank: int, folder: str, kit: Kit, own: dict[str, Own]) -> None:
    """The same ranks in another layout are refused what each of them keeps, unless it is named."""
    state, kept = make_state(rank, "cells", (2, 2), 1), {"own": Own("kept")}
    other = kit_of(state, seed=9)
    before = truth_of(other)
    with pytest.raises(xffl.ConfigError, match=r"cells \(2, 2\), replica size 2, .* replica size 1.*reset=\['own'\]"):
        load_checkpoint(f"{folder}/good", other.parts(), state, own=kept)
    assert_same(truth_of(other), before)
    load_checkpoint(f"{folder}/good", other.parts(), state, own=kept, reset=["own"])
    assert kept["own"].value == "kept"


def loads(rank: int, world_size: int, folder: str, layout: str, sizes: tuple[int, ...], hsdp: int | None) -> Any:
    state = make_state(rank, layout, sizes, hsdp)
    kit = kit_of(None if layout == "plain" else state, seed=5)
    before = truth_of(kit)
    cells = len(sizes) or 1
    with pytest.raises(xffl.ConfigError, match=r"reset=\['own'\]"):
        load_checkpoint(f"{folder}/good", kit.parts(), state, own={"own": Own(0)})
    if cells != 2:
        with pytest.raises(xffl.CheckpointError, match=r"start 2 cells \(of any sizes\), or save right after a round"):
            load_checkpoint(f"{folder}/between", kit.parts(), state)
        with pytest.raises(
            xffl.CheckpointError, match=r"'model/\S+' is not the same in \S+/lying/cell_1 .*__0_0\.dist"
        ):
            load_checkpoint(f"{folder}/lying", kit.parts(), state)
    assert_same(truth_of(kit), before)
    assert load_checkpoint(f"{folder}/good", kit.parts(), state, reset=["own"]) == {"step": 2}
    loaded = truth_of(kit)
    cell = state.topology.cell_of(rank)
    place, places = rank - state.topology.offsets[cell], state.topology.sizes[cell]
    stepped = next_step(kit, place, places)
    if cells != 2:
        local = [f"model/{name}" for name in stepped]
        load_checkpoint(f"{folder}/lying", kit.parts(), state, local=local)
    return loaded, stepped, truth_of(kit)["model"]


def test_after_a_round_any_number_of_cells_goes_on(tmp_path: Path) -> None:
    saved = run_world(4, saves, str(tmp_path))
    truth, stepped = saved[0]
    for other in saved[1:]:
        assert_same(other[0], truth)
    for layout, sizes, hsdp in (
        ("fsdp", (2,), None),
        ("plain", (1,), None),
        ("cells", (2, 1), 1),
        ("cells", (1, 2, 1), None),
    ):
        world_size = sum(sizes)
        given = (layout, sizes if layout == "cells" else (), hsdp)
        ranks = run_world(world_size, loads, str(tmp_path), *given, init=layout != "plain")
        for rank, (loaded, after, lying) in enumerate(ranks):
            assert_same(loaded, truth, f"rank {rank} of {given}")
            for name, value in stepped.items():
                torch.testing.assert_close(after[name], value, atol=1e-6, rtol=0, msg=f"{name} on {rank} of {given}")
            if sizes == (1, 2, 1):  # cells 0 and 2 read what cell 0 has written, cell 1 what cell 1 has
                is_first = torch.equal(lying["norm.weight"], ranks[0][2]["norm.weight"])
                assert is_first == (rank in (0, 3))
    with pytest.raises(xffl.ConfigError, match=r"2 cells and was not saved right after a round.*--cell"):
        consolidate_checkpoint(tmp_path / "between", tmp_path / "out")
    from safetensors.torch import load_file

    consolidate_checkpoint(tmp_path / "good", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert_same({name: found[name] for name in truth["model"]}, dict(truth["model"]))
    for cell in (0, 1):
        consolidate_checkpoint(tmp_path / "between", tmp_path / f"out_{cell}", cell=cell)
    one, two = (load_file(tmp_path / f"out_{cell}" / "model.safetensors") for cell in (0, 1))
    assert not torch.equal(one["norm.weight"], two["norm.weight"])
