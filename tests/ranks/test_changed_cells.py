"""A run that goes on with other cells counts its steps, samples and rounds on, and so does what shows them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.ranks.test_strategies import joined
from tests.tasks import TaskConfig, TaskTrainer
from tests.worlds import run_world
from xffl.parallel import DistributedConfig
from xffl.run_report.reader import read_run
from xffl.run_report.summary import summary_rows
from xffl.training import Callback, ExperimentConfig, FederationConfig, TrainingParameters
from xffl.training.callbacks import CheckpointCallback, ProgressCallback

SAMPLES = 60
BATCH = 10
EVERY = 2


class Shown(ProgressCallback):
    """Keeps its lines, one for each batch."""

    def __init__(self) -> None:
        super().__init__(every_s=1e-9, is_live=False)
        self.text = io.StringIO()

    def make_console(self) -> Console:
        return Console(file=self.text, width=200)


class Rounds(Callback):
    """Notes what it is told of rounds, and what the trainer has counted then."""

    def __init__(self) -> None:
        self.numbers: list[tuple[int, int]] = []

    def post_round(self, trainer: Any, report: Any) -> None:
        if not report.is_skipped:
            self.numbers.append((report.round, trainer.rounds))


def train(rank: int, world_size: int, folder: str, epochs: int, is_reset: bool) -> Any:
    shown, rounds = Shown(), Rounds()
    config = TaskConfig(
        experiment=ExperimentConfig(name="changed", output_dir=folder, reset=is_reset),
        distributed=DistributedConfig(strategy="single", federated=(1,) * world_size),
        training=TrainingParameters(epochs=epochs, batch_size=BATCH, log_every=1, validate_every_rounds=3),
        federation=FederationConfig(every=EVERY),
        callbacks=[shown, rounds, CheckpointCallback(every_rounds=2, keep_last_n=9)],
        samples=SAMPLES,
        dropout=0.0,
    )
    trainer = TaskTrainer(config)
    trainer.fit(joined(rank, world_size))
    counts = {"step": trainer.global_step, "samples": trainer.samples, "rounds": trainer.rounds}
    lines = [line for line in shown.text.getvalue().splitlines() if "step " in line]
    return counts, rounds.numbers, lines, trainer.measured_rounds


def test_counts_go_on_when_the_cells_change(tmp_path: Path) -> None:
    folder = str(tmp_path)
    two = run_world(2, train, folder, 2, False)
    three = run_world(3, train, folder, 4, True)
    again = run_world(2, train, folder, 5, True)
    # Two cells make 3 steps of 30 samples in an epoch, three cells 2 steps of 20.
    assert [counts for counts, *_ in two] == [{"step": 6, "samples": 60, "rounds": 3}] * 2
    assert [counts["step"] for counts, *_ in three] == [10] * 3
    assert [counts["samples"] for counts, *_ in three] == [100, 100, 40]
    assert [counts["rounds"] for counts, *_ in three] == [5] * 3
    assert [counts["step"] for counts, *_ in again] == [13] * 2
    assert [counts["samples"] for counts, *_ in again] == [130, 130]
    numbers = [number for run in (two, three, again) for number in run[0][1]]
    assert [told for told, _ in numbers] == [counted for _, counted in numbers] == [1, 2, 3, 4, 5, 6, 7]
    assert again[0][3] == 7  # the last round's model was validated

    # Checkpoints at every second round, wherever the cells changed.
    saved = {path.name for path in (tmp_path / "checkpoints").glob("step_*")}
    assert saved == {"step_4", "step_8", "step_12"}

    # Progress: all steps of the run, and the steps until the next round.
    assert all("step 6/6" in lines[-1] for _, _, lines, _ in two)
    assert all("step 10/10" in lines[-1] and "/10" in lines[0] for _, _, lines, _ in three)
    assert all("step 13/13" in lines[-1] and "/13" in lines[0] for _, _, lines, _ in again)

    run = read_run(tmp_path)
    rows = dict(summary_rows(run))
    assert rows["samples, all cells"] == str(5 * SAMPLES)
    assert rows["steps"] == "13" and rows["rounds"] == "7" and rows["ranks and cells"].startswith("2 in 2 cells")
    assert any("cell 2 has left" in note and "step 10" in note for note in run.notes)
    records = [json.loads(line) for line in (tmp_path / "rounds" / "cell_0.jsonl").read_text().splitlines()]
    assert [record["round"] for record in records if not record["is_skipped"]] == [1, 2, 3, 4, 5, 6, 7]
