"""One line that makes a Trainer train one cell of a federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from xffl.aggregation.algorithms.clients import Client
from xffl.aggregation.algorithms.every_steps import Schedule
from xffl.distributed.adoption import adopt
from xffl.distributed.several_worlds.cell_notes import open_notes
from xffl.errors import ConfigError, StateError
from xffl.extras import optional_import
from xffl.integrations.cells import check_cells
from xffl.integrations.checkpoints import CellCheckpoints, trained_names
from xffl.integrations.dealing import deal_out
from xffl.integrations.transformers.refusals import check_arguments, check_loader
from xffl.integrations.transformers.trainer_files import TrainerFiles
from xffl.integrations.transformers.zero import check_engine
from xffl.integrations.weights import BatchCount, find_count, label_names, shifts_labels

if TYPE_CHECKING:
    from xffl.integrations.transformers.callback import TrainerRounds

__all__ = ["federate"]


def federate(
    trainer: Any,
    *,
    every: int | str | Mapping[str, Any] | Schedule | None = None,
    algorithm: str | Mapping[str, Any] | None = None,
    weight: Literal["tokens", "samples"] | float = "tokens",
    data: Literal["split", "own"] = "split",
    seed: int = 0,
    delay: int | None = None,
    alpha: float | None = None,
    client: str | Mapping[str, Any] | Client | None = None,
    moments: str | Mapping[str, Any] | None = None,
    aggregator: Mapping[str, Any] | None = None,
) -> TrainerRounds:
    """Let a Trainer of transformers train one cell of a federation; collective over the ranks of the cell.

    Call it once, after the Trainer is made and before ``trainer.train()``, in a script that is started with ``xffl exec
    --isolate`` or ``--elastic`` (:doc:`/frameworks`). Trainer then trains over the ranks of its cell as it always does,
    and rounds are made between its optimizer steps. Its checkpoints go into ``output_dir/cell_N`` and hold the state of
    the rounds; ``trainer.train()`` continues by itself from the newest one that all cells have, and
    ``trainer.train(resume_from_checkpoint=False)`` begins anew. Isolated cells begin with the model of cell 0.

    .. code-block:: python

       trainer = Trainer(model=model, args=args, train_dataset=dataset)
       federate(trainer, every=100, algorithm="diloco")
       trainer.train()

    :param trainer: A Trainer, or what derives from it.
    :param every: As for :class:`xffl.FederatedScaling`.
    :param algorithm: As for :class:`xffl.FederatedScaling`.
    :param weight: What a cell's model counts in a round: the ``tokens`` that it was trained on since the last one
        (labels other than -100), the ``samples``, or a number for this cell.
    :param data: ``split`` deals ``train_dataset`` out to the cells at random, the same for all ranks of a cell;
        ``own`` leaves it as it is, where each cell has data of its own.
    :param seed: Of the random order in which the samples are dealt out; the same in all cells.
    :param delay: As for :class:`xffl.FederatedScaling`.
    :param alpha: As for :class:`xffl.FederatedScaling`.
    :param client: As for :class:`xffl.FederatedScaling`.
    :param moments: As for :class:`xffl.FederatedScaling`.
    :param aggregator: Keywords of the aggregator, such as ``{"codec": "int8"}``.
    :return: The rounds: ``reports`` and ``state`` (``state.cell``, ``state.cells``) are for the script.
    :raises ConfigError: if an argument is invalid, an argument of the Trainer does not go together with rounds, its
        ranks are no single cell, or transformers cannot be imported.
    :raises StateError: if the Trainer is federated already.
    """
    with optional_import("hf", "federate needs transformers and accelerate"):
        from xffl.integrations.transformers.callback import TrainerRounds

    check_arguments(trainer)
    check_engine(trainer)
    if data == "split":
        check_loader(trainer)
    if any(isinstance(callback, TrainerRounds) for callback in trainer.callback_handler.callbacks):
        raise StateError("this Trainer is federated already; call federate() once for each")
    if data not in ("split", "own"):
        raise ConfigError(f"data is {data!r}; give 'split' or 'own'")
    state = adopt()
    check_cells(state, "Trainer")
    model = trainer.model
    count = find_count(weight, state.cell_rank, is_shifted=shifts_labels(model), names=label_names(model))
    if data == "split":
        trainer.train_dataset = deal_out(trainer.train_dataset, cell=state.cell, cells=state.cells, seed=seed)
    options = {
        "every": every,
        "algorithm": algorithm,
        "delay": delay,
        "alpha": alpha,
        "client": client,
        "moments": moments,
        "aggregator": aggregator,
    }
    rounds = TrainerRounds(trainer, state, count, options)
    kept = trainer.args.save_total_limit
    if not trainer.args.save_only_model:
        trainer.args.save_total_limit = None  # Trainer would remove what a slower cell still needs
    trainer.args.output_dir = str(Path(trainer.args.output_dir) / f"cell_{state.cell}")
    trainer.callback_handler.callbacks.insert(0, rounds)  # the others see the last round's model in on_train_end
    _count_batches(trainer, count)
    _make_no_step_too_many(trainer)
    counted = weight if isinstance(weight, str) else "a number"
    _train_in_rounds(trainer, rounds, kept, f"weight={counted}, data={data}, seed={seed}")
    return rounds


def _count_batches(trainer: Any, count: BatchCount) -> None:
    """Count each batch that the Trainer trains on."""
    training_step = trainer.training_step

    @wraps(training_step)
    def count_and_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        count.add(inputs)
        return training_step(model, inputs, *args, **kwargs)

    trainer.training_step = count_and_step


def _make_no_step_too_many(trainer: Any) -> None:
    """Give no batch to a training that is over: Trainer makes one step more when it resumes behind its last one.

    It looks whether it is to stop after each step, and not before the first.
    """
    get_batch_samples = trainer.get_batch_samples

    @wraps(get_batch_samples)
    def get_unless_over(*args: Any, **kwargs: Any) -> Any:
        return ([], None) if trainer.control.should_training_stop else get_batch_samples(*args, **kwargs)

    trainer.get_batch_samples = get_unless_over


def _train_in_rounds(trainer: Any, rounds: TrainerRounds, kept: int | None, arguments: str) -> None:
    """Let ``train`` continue from a checkpoint that all cells have, and leave the rounds after an error.

    Trainer has no event for an error.
    """
    train: Callable[..., Any] = trainer.train

    @wraps(train)
    def train_cell(resume_from_checkpoint: bool | None = None, trial: Any = None, **kwargs: Any) -> Any:
        if resume_from_checkpoint not in (None, True, False):
            raise ConfigError(
                f"train(resume_from_checkpoint={resume_from_checkpoint!r}): a federated Trainer continues from the "
                "newest checkpoint that all cells have; leave it out, or give False to begin anew"
            )
        if trial is not None:
            raise ConfigError("a federated Trainer does not know hyperparameter_search; start a job for each setting")
        notes = open_notes(rounds.state, "trainer")
        files = TrainerFiles(Path(trainer.args.output_dir), kept)
        checkpoints = CellCheckpoints(files, rounds.state, notes, trained_names(trainer.model))
        folder = rounds.begin(checkpoints, notes, arguments, starts_over=resume_from_checkpoint is False)
        try:
            return train(resume_from_checkpoint=folder, **kwargs)
        except BaseException as error:
            rounds.end(error)
            raise

    trainer.train = train_cell
