"""The second example: cells that lack most classes, and a cell that sends garbage."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.test_round import make_state
from tests.rows import some_of
from tests.worlds import run_world
from xffl.topology import DataPlace, Topology
from xffl.training.data.sampler import CellBatchSampler

np = pytest.importorskip("numpy")
pytest.importorskip("sklearn")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "05_noniid"


def load(name: str) -> ModuleType:
    """Import a script of the example under a name of its own: the first example has a train.py, too."""
    spec = importlib.util.spec_from_file_location(f"noniid_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(EXAMPLE))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLE))
    return module


noniid, methods, train, garbage, run = map(load, ("noniid", "methods", "train", "garbage", "run"))
SEED, ROUNDS = 0, 6


# The data -------------------------------------------------------------------------------------------------------------


def test_three_parts_share_the_images_out() -> None:
    data = noniid.load()
    images = [part[0].flatten(1) for part in (data.training, data.validation, data.test)]
    assert [len(part) for part in images] == [1151, 287, 359]
    everything = {row.tobytes() for row in noniid.digits.load()[0].reshape(-1, 64)}
    parts = [{row.tobytes() for row in part.numpy()} for part in images]
    assert set.union(*parts) == everything
    assert sum(map(len, parts)) == len(everything), "what is chosen on and what is tested on have nothing in common"


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_each_of_four_cells_lacks_most_classes(seed: int) -> None:
    labels = noniid.load().labels
    parts = noniid.deal(labels, 4, "noniid", seed)
    counts = parts.table(labels)
    assert counts.sum() == len(labels)
    assert ((counts > 0).sum(axis=1) <= 4).all(), "six classes and more are missing"
    assert (np.sort(counts, axis=1)[:, -3:].sum(axis=1) >= 0.99 * np.array(parts.sizes)).all(), "three are nearly all"
    assert ((counts > 0).sum(axis=0) >= 1).all()
    assert max(parts.sizes) - min(parts.sizes) <= 1
    assert (noniid.deal(labels, 5, "iid", seed).table(labels) > 0).all()


# The algorithms -------------------------------------------------------------------------------------------------------


def test_what_was_chosen_is_the_best_of_as_many_tries_for_each() -> None:
    found = json.loads(methods.CHOSEN.read_text())
    assert not {0, 1, 2, 3, 4} & set(found["seeds"]), "seeds of the comparison are not for choosing"
    tried = [(one["run"], one["lr"], one["options"]) for one in found["tried"]]
    assert tried == [(trial.run, trial.lr, trial.options) for trial in methods.grid_trials()]
    for trial in methods.chosen_trials():
        mine = [one for one in found["tried"] if one["run"] == trial.run]
        assert len(mine) == 9
        best = max(mine, key=lambda one: one["accuracy"])
        own = next(one for one in mine if (one["lr"], one["options"]) == (trial.lr, trial.options))
        assert own["accuracy"] == best["accuracy"]


def trained(rank: int, world_size: int, trials: list[Any], rounds: int) -> list[list[dict[str, Any]]]:
    torch.manual_seed(rank)  # what is drawn must not depend on it
    state, data = make_state(rank, (1,) * world_size, None), noniid.load()
    return [train.train(state, trial, data, seed=SEED, rounds=rounds, part="test") for trial in trials]


def batches_of(cell: int, labels: Any, rounds: int) -> Iterator[Iterator[list[int]]]:
    """Yield a cell's batches, round by round."""
    parts = noniid.deal(labels, 4, "noniid", SEED)
    place = DataPlace(Topology(4, (1, 1, 1, 1)), cell)
    sampler = CellBatchSampler(parts, place, batch_size=noniid.BATCH_SIZE, seed=SEED)
    for epoch in range(rounds):
        sampler.set_epoch(epoch)
        yield iter(sampler)


def dense(lr: float, rounds: int, *, is_scaffold: bool) -> list[tuple[float, float]]:
    """FedAvg and SCAFFOLD (option II of algorithm 1) in one process, in fp64; accuracy and loss after each round."""
    data = noniid.load()
    images, labels = data.training[0].double(), data.training[1]
    test = data.test[0].double(), data.test[1]
    model = noniid.initialize(SEED).double()
    weights = [one.detach().clone() for one in model.parameters()]
    mine = [[torch.zeros_like(one) for one in weights] for _ in range(4)]
    common = [torch.zeros_like(one) for one in weights]
    streams = [batches_of(cell, data.labels, rounds) for cell in range(4)]
    measured = []
    for _ in range(rounds):
        ends = []
        for cell in range(4):
            here = [one.clone().requires_grad_() for one in weights]
            steps = 0
            for batch in next(streams[cell]):
                logits = torch.func.functional_call(
                    model, dict(zip(dict(model.named_parameters()), here, strict=True)), images[batch]
                )
                gradients = torch.autograd.grad(nn.functional.cross_entropy(logits, labels[batch]), here)
                for index, (one, gradient) in enumerate(zip(here, gradients, strict=True)):
                    drift = common[index] - mine[cell][index] if is_scaffold else 0.0
                    one.data -= lr * (gradient + drift)
                steps += 1
            ends.append([one.detach() for one in here])
            for index, one in enumerate(ends[cell]):
                mine[cell][index] += (weights[index] - one) / (steps * lr) - common[index]
        weights = [torch.stack(cells).mean(0) for cells in zip(*ends, strict=True)]
        common = [torch.stack(cells).mean(0) for cells in zip(*mine, strict=True)]
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.data.copy_(value)
        measured.append(noniid.measure(model, test))
    return measured


def test_algorithms_on_cells_that_lack_most_classes() -> None:
    """FedAvg and SCAFFOLD are those of a dense implementation, and others that are meant to be faster are."""
    trials = [trial for trial in methods.chosen_trials() if trial.run != methods.CENTRALIZED]
    everyone = run_world(4, trained, trials, ROUNDS)
    curves = {trial.run: records for trial, records in zip(trials, everyone[0], strict=True)}
    for other in everyone[1:]:
        for mine, its in zip(everyone[0], other, strict=True):
            assert [one["loss"] for one in mine] == [one["loss"] for one in its], "all cells have one model"
    for name in ("fedavg", "scaffold"):
        expected = dense(curves[name][0]["lr"], ROUNDS, is_scaffold=name == "scaffold")
        # Rounding of fp32 grows with the steps; another rule would be off by far more.
        assert [one["loss"] for one in curves[name]] == pytest.approx([loss for _, loss in expected], rel=1e-2), name
        assert [one["loss"] for one in curves[name]][:2] == pytest.approx([loss for _, loss in expected][:2], rel=1e-4)
    area = {name: statistics.fmean(one["accuracy"] for one in records) for name, records in curves.items()}
    assert min(area["scaffold"], area["fedadam"], area["fedyogi"]) > area["fedavg"] + 0.02, area
    sent = {name: records[-1]["bytes_across"] for name, records in curves.items()}
    assert {sent[name] for name in sent if name != "scaffold"} == {sent["fedavg"]}
    assert sent["scaffold"] == 2 * sent["fedavg"] > 0, "control variates are as large as the model"
    central = next(trial for trial in methods.chosen_trials() if trial.run == methods.CENTRALIZED)
    alone = run_world(1, trained, [central], ROUNDS)[0][0]
    assert statistics.fmean(one["accuracy"] for one in alone) > area["fedavg"] + 0.02
    assert alone[-1]["step"] == curves["fedavg"][-1]["step"], "a round is a pass over the data, for all"


# Garbage --------------------------------------------------------------------------------------------------------------


def spoiled(rank: int, world_size: int, tried: list[Any], rounds: int) -> list[tuple[Any, Any]]:
    state, data = make_state(rank, (1,) * world_size, None), noniid.load()
    return list(garbage.trainings(state, data, seed=SEED, rounds=rounds, tried=tried))


GARBAGE_ROUNDS = 40
TRIED = [
    *(garbage.Case("flip", combine) for combine in ("mean", "median", "multi_krum")),
    garbage.Case("nan", "mean"),
    *(garbage.Case("nan", combine, "drop_cell") for combine in ("mean", "trimmed_mean", "krum", "multi_krum")),
]
TRIED_AT_NIGHT = [
    *(garbage.Case("flip", name) for name in garbage.COMBINERS if garbage.Case("flip", name) not in TRIED),
    *(garbage.Case("huge", combine) for combine in ("mean", "krum", "norm_clipping")),
]


@pytest.fixture(scope="module")
def stood(request: pytest.FixtureRequest) -> dict[Any, Any]:
    """What became of each case: the same on all ranks."""
    tried = TRIED + (TRIED_AT_NIGHT if "long" in request.config.option.markexpr else [])
    assert set(tried) <= set(garbage.cases())
    everyone = [dict(one) for one in run_world(garbage.CELLS, spoiled, tried, GARBAGE_ROUNDS)]
    for case, ended in everyone[0].items():
        assert all(other[case].accuracy == ended.accuracy for other in everyone), case
        assert all(bool(other[case].error) == bool(ended.error) for other in everyone), case
    return everyone[0]


def clean(stood: dict[Any, Any]) -> float:
    accuracy: float = stood[garbage.Case(garbage.CLEAN, "mean")].accuracy
    assert accuracy > 0.9
    return accuracy


@pytest.mark.parametrize("kind", some_of(["flip", "huge"], "huge"))
def test_robust_combiners_end_near_the_clean_accuracy_and_the_mean_does_not(stood: dict[Any, Any], kind: str) -> None:
    ends = {case.combine: ended for case, ended in stood.items() if case.garbage == kind}
    plain = ends.pop("mean")
    assert plain.accuracy < clean(stood) - 0.5
    assert not [combine for combine, ended in ends.items() if ended.error or ended.rounds != GARBAGE_ROUNDS]
    behind = {combine: clean(stood) - ended.accuracy for combine, ended in ends.items()}
    # After so few rounds the slow ones lag; docs/noniid.rst has who ends how near. The mean is at a tenth, a guess.
    assert max(behind.values()) <= 0.1, behind
    assert behind.get("multi_krum", 0.0) <= 0.02, "the mean of honest cells"


def test_a_cell_with_nan_is_named_and_left_out(stood: dict[Any, Any]) -> None:
    ended = stood[garbage.Case("nan", "mean", "drop_cell")]
    assert ended.dropped == {garbage.BAD_CELL: GARBAGE_ROUNDS}
    assert ended.named == {garbage.BAD_CELL: ["3.weight"]}
    assert not ended.error
    assert ended.accuracy >= clean(stood) - 0.02


def test_by_default_the_round_is_rejected_and_says_why(stood: dict[Any, Any]) -> None:
    ended = stood[garbage.Case("nan", "mean")]
    assert ended.rounds == 0
    assert f"cell {garbage.BAD_CELL} holds values that are not finite in '3.weight'" in ended.error
    assert ended.accuracy < 0.7, "cells that each made a few steps"


def test_who_needs_five_cells_refuses_four(stood: dict[Any, Any]) -> None:
    for combine in ("trimmed_mean", "krum", "multi_krum"):
        ended = stood[garbage.Case("nan", combine, "drop_cell")]
        assert ended.rounds == 0
        assert "4 contributing cells" in ended.error


# The report -----------------------------------------------------------------------------------------------------------

RECORDS = [
    {"run": name, "seed": seed, "round": number, "accuracy": accuracy}
    for name, curves in {
        "fast": ([0.5, 0.9, 0.8, 0.95], [0.3, 0.7, 0.91, 0.93]),
        "slow": ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.92]),
        "hopeless": ([0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1]),
    }.items()
    for seed, curve in enumerate(curves)
    for number, accuracy in enumerate(curve, 1)
]


def test_sums_are_those_counted_by_hand() -> None:
    fast, slow, hopeless = run.sum_up_seeds(RECORDS)
    assert (fast.run, fast.seeds) == ("fast", 2)
    assert fast.curve[1] == (2, pytest.approx(0.8), 0.7, 0.9)
    assert fast.finals == (0.95, 0.93)
    assert fast.final == pytest.approx(0.94)
    assert fast.spread == pytest.approx(0.02 / 2**0.5)
    assert fast.reached == (2, 3), "the first round, though the next one is below again"
    assert fast.typical_round == 2.5
    assert slow.reached == (None, 4)
    assert slow.typical_round == hopeless.typical_round == float("inf")
    assert [one.reached for one in run.sum_up_seeds(RECORDS, target=0.99)] == [(None, None)] * 3
    assert run.sum_up_seeds(reversed(RECORDS))[0].run == "hopeless"


def test_the_picture_names_all_and_says_never(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run.algorithms_figure(RECORDS, tmp_path / "a.svg", title="Who is fast")
    drawn = (tmp_path / "a.svg").read_text()
    for text in ("Who is fast", "fast", "slow", "hopeless", "never", "94.0 % ± 1.4", "mean of 2 seeds"):
        assert text in drawn
    run.algorithms_figure([one for one in RECORDS if one["run"] == "fast"], tmp_path / "b.svg")
    assert "never" not in (tmp_path / "b.svg").read_text()
    with pytest.raises(ValueError, match="hopeless were measured after different rounds"):
        run.sum_up_seeds(RECORDS[:-1])


def test_garbage_is_compared_with_the_clean_run_of_its_seed() -> None:
    def record(kind: str, seed: int, accuracy: float, error: str = "") -> dict[str, Any]:
        case = {"garbage": kind, "combine": "mean", "nonfinite": "reject", "seed": seed, "accuracy": accuracy}
        return {**case, "rounds": 3, "error": error, "dropped": {}, "named": {}, "norm": 1.0}

    pairs = [record("clean", 0, 0.9), record("clean", 1, 0.8), record("flip", 0, 0.885), record("flip", 1, 0.81)]
    _, flip = run.garbage_rows(pairs)
    assert flip["worst_behind_clean"] == pytest.approx(0.015)
    assert flip["mean_behind_clean"] == pytest.approx(0.0025)
    assert flip["is_within"]
    _, flip = run.garbage_rows([*pairs[:3], record("flip", 1, 0.779)])
    assert flip["worst_behind_clean"] == pytest.approx(0.021)
    assert flip["mean_behind_clean"] == pytest.approx(0.018)
    assert flip["is_within"], "the mean decides, though one seed is farther behind"
    rows = run.garbage_rows([*pairs[:3], record("flip", 1, 0.769)])
    assert rows[1]["mean_behind_clean"] == pytest.approx(0.023)
    assert [row["is_within"] for row in rows] == [True, False]
    table = run.garbage_table(rows)
    cells = {column.header: list(column.cells) for column in table.columns}
    assert (cells["behind"], cells["worst"]) == (["", "2.3"], ["", "3.1"])
    _, flip = run.garbage_rows([*pairs[:3], record("flip", 1, 0.81, "rejected; for good")])
    assert not flip["is_within"]
    notes = ["another"]
    assert run.story(flip, notes) == "round 4 rejected (2)"
    assert run.story(flip, notes) == "round 4 rejected (2)"
    assert notes == ["another", "rejected"], "a reason is told once"


def test_rounds_are_told_with_their_median() -> None:
    assert run.told_rounds([3, 5, None]) == "5 (3 5 never)"
    assert run.told_rounds([3, None, None]) == "never (3 never never)"
