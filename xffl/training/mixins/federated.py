"""Rounds of a trainer, over a network or over files."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from xffl.aggregation.engine.planning.tensors import Manifest
from xffl.aggregation.exports import RoundPlan, agreed_global, export_cell, load_agreed_global
from xffl.aggregation.federated_scaling import FederatedScaling
from xffl.aggregation.options import REMOVED
from xffl.aggregation.report import ElasticRoundReport, RoundReport
from xffl.aggregation.rounds.config import RoundArguments
from xffl.aggregation.rounds.given_config import validate_round_config
from xffl.aggregation.rounds.loop_hooks import LoopHooks
from xffl.checks import index_of, integer_fields, number, one_of
from xffl.cluster.recognition.find import find_launcher
from xffl.cluster.sizes_text import parse_cell
from xffl.distributed.distributed_state import cell_world_of, set_cell_world, set_data_place
from xffl.distributed.values.sharding import sharded_parameters
from xffl.errors import ConfigError, StateError, XfflError
from xffl.files import make_folders, write_whole
from xffl.topology import DataPlace, Topology
from xffl.training.mixins.base import StatePart
from xffl.training.mixins.validation import ValidationMixin

__all__ = ["FederatedConfigMixin", "FederatedMixin", "FederationConfig"]

WEIGHTS = ("samples", "equal")


def _is_first_rank() -> bool:
    """Tell whether this is rank 0, as far as is known where a configuration is read; local."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    row = find_launcher(os.environ)
    try:
        return row is None or int(row.read(os.environ)["rank"]) == 0
    except XfflError:  # reported where the process group is made
        return True


@dataclass(frozen=True, kw_only=True)
class FederationConfig:
    """When and how the cells' models are averaged; see :class:`xffl.FederatedScaling`.

    :param every: Local steps between two rounds, or a schedule by name; ``None`` for what the algorithm says, and for
        no rounds where there is no algorithm.
    :param algorithm: An algorithm by name, with options (``fedadam:lr=0.03``, ``diloco``).
    :param aggregator: Keywords of the aggregator (``{codec: int8, rails: true}``).
    :param delay: Local steps that go on while a round is under way.
    :param alpha: With a delay, the part of a local value that stays when the mean is merged.
    :param client: What changes the cells' local steps (``fedprox:mu=0.01``).
    :param moments: What rounds do with what optimizers keep beside the parameters (``average:exp_avg_sq=6``).
    :param weight: What a cell counts for in a round: its ``samples`` since the last one, or all ``equal``.
    :param max_samples: Samples of all cells together after which training ends in all of them, at the round that has
        taken them in; ``None`` for no such limit. A cell that comes late ends with the others then, which train longer.
    :param meeting_timeout_s: How long a cell of an elastic run waits for others to make a round with, before it ends;
        ``None`` for half an hour. Other runs do not read it.
    :param cell: Which cell this job is, where each is a job of its own and rounds go over files: ``0/2``, or ``0/4,2``
        with the ranks of each (``--cell``). The job ends when ``every`` steps of its round are made; server optimizer
        and combiner are for ``xffl aggregate``, which learns of them from the exports.
    :param round: With ``cell``, the round that this job is for; by default the one after that of ``start_from``. 0
        exports the start, which a server optimizer needs, and trains nothing.
    :param start_from: With ``cell``, the global model to start from, as ``xffl aggregate`` wrote it (``--from``); what
        a checkpoint of this run has started from already is not loaded again.
    :param export_to: With ``cell``, where to write at the end what a round would average (``--export``).
    :param measure_to: Train nothing: measure the model of ``start_from`` on the validation data, and write the values
        into this file (``--measure``).
    """

    every: int | str | dict[str, Any] | None = None
    algorithm: str | dict[str, Any] | None = None
    aggregator: dict[str, Any] = field(default_factory=dict)
    delay: int | None = None
    alpha: float | None = None
    client: str | dict[str, Any] | None = None
    moments: str | dict[str, Any] | None = None
    weight: str = "samples"
    max_samples: int | None = None
    meeting_timeout_s: float | None = None
    cell: str | None = None
    round: int | None = None
    start_from: str | None = None
    export_to: str | None = None
    measure_to: str | None = None

    def __post_init__(self) -> None:
        one_of("federation.weight", self.weight, WEIGHTS)
        integer_fields(self, "round", minimum=0, prefix="federation.", may_be_none=True)
        integer_fields(self, "max_samples", prefix="federation.", may_be_none=True)
        if self.meeting_timeout_s is not None:
            number("federation.meeting_timeout_s", self.meeting_timeout_s, above=0, below=1e9, hint="give seconds")
        for name in ("every", "delay"):
            value = getattr(self, name)
            object.__setattr__(self, name, value if index_of(value) is None else index_of(value))
        self._forget_removed()
        plan = {name: getattr(self, name) for name in ("delay", "alpha", "client", "moments", "aggregator")}
        is_asked = self.every is not None or self.algorithm is not None
        if self.max_samples is not None:
            self._check_max_samples(is_asked)
        if is_asked:
            validate_round_config(RoundArguments(self.every, algorithm=self.algorithm, **plan))
        if self.is_alone:
            self._check_alone()
            return
        for name in ("round", "start_from", "export_to"):
            if getattr(self, name) is not None:
                raise ConfigError(f"federation.{name} is for a cell that is a job of its own; give cell, such as 0/2")
        for name, value in plan.items():
            if not is_asked and value is not None and value != {}:
                raise ConfigError(
                    f"federation.{name} {value!r} is for rounds, and there are none; give federation.every, or "
                    "leave it out"
                )

    def _forget_removed(self) -> None:
        """Leave out options that a configuration of before may have and that change no result."""
        if removed := sorted(self.aggregator.keys() & REMOVED.keys()):
            kept = {name: value for name, value in self.aggregator.items() if name not in REMOVED}
            object.__setattr__(self, "aggregator", kept)
            if _is_first_rank():
                for name in removed:
                    text = f"xffl: federation.aggregator: {name} is ignored: {REMOVED[name]}"
                    print(text, file=sys.stderr, flush=True)

    def _check_max_samples(self, is_asked: bool) -> None:
        """Refuse a limit on the samples of all cells where nobody counts them."""
        if not is_asked or self.is_alone:
            raise ConfigError(
                f"federation.max_samples {self.max_samples} is for rounds over a network, and there are none; give "
                "federation.every, or leave it out"
            )
        if self.weight != "samples" or "levels" in self.aggregator:
            what = "levels" if "levels" in self.aggregator else f"weight {self.weight!r}"
            raise ConfigError(
                f"federation.max_samples {self.max_samples} counts what the weights of rounds tell of samples, which "
                f"goes with weight: samples and without levels; there is {what}"
            )

    def _check_alone(self) -> None:
        """Refuse what does not go with rounds over files."""
        if self.cell is not None:
            parse_cell(self.cell, "federation.cell")
        if not isinstance(self.every, int | None):
            raise ConfigError(
                f"federation.every is {self.every!r}, but rounds over files come after a number of steps; give that"
            )
        for name in ("delay", "alpha", "client", "moments"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"federation.{name} {getattr(self, name)!r} is for rounds over a network, and this job is a cell "
                    "of its own, whose rounds go over files; leave it out"
                )
        self.plan.check()

    @property
    def has_rounds(self) -> bool:
        """Whether rounds between cells of this job are asked for."""
        return not self.is_alone and (self.every is not None or self.algorithm is not None)

    @property
    def is_alone(self) -> bool:
        """Whether this job trains one cell, or measures a model: rounds go over files."""
        return self.cell is not None or self.measure_to is not None

    @property
    def steps(self) -> int | None:
        """Local steps of a round over files; ``None`` where the job's end is the round's."""
        return self.every if isinstance(self.every, int) else None

    @property
    def plan(self) -> RoundPlan:
        """What ``xffl aggregate`` is to make of exports."""
        return RoundPlan(
            self.algorithm, {name: option for name, option in self.aggregator.items() if name != "policies"}
        )


@dataclass(kw_only=True)
class FederatedConfigMixin:
    """The section of rounds.

    :param federation: When and how the cells' models are averaged.
    """

    federation: FederationConfig = field(default_factory=FederationConfig)


class FederatedMixin(ValidationMixin):
    """Run rounds between the cells while a trainer trains."""

    _scaling: FederatedScaling | None = None
    _fresh: int = 0
    """Samples that this rank has seen since the aggregator last asked"""

    _global_round: int = 0
    """The round whose model this cell, a job of its own, has started from; 0 for the common start"""

    _global_digest: str | None = None
    """Of that model"""

    _untold: Mapping[str, float] | None = None
    """What this cell has measured since the last round, in an elastic run"""
    _validations: int = 0
    """The number of what was reported since this start of the cell"""

    def configure(self) -> None:
        """Take the place of one of several cells, where this job is one."""
        if self.state.isolated is not None:
            raise ConfigError(
                "the trainer keeps its cells apart in one world, where it also compares their metrics; leave isolate "
                "out, which is for scripts and for trainers of other frameworks"
            )
        meeting_timeout_s = self.section("federation", FederationConfig).meeting_timeout_s
        world = cell_world_of(self.state)
        if meeting_timeout_s is not None and world is not None and world.elastic is not None:
            elastic = replace(world.elastic, meeting_timeout_s=meeting_timeout_s)
            set_cell_world(self.state, replace(world, elastic=elastic))
        lone = self.lone_cell()
        if lone is not None:
            self.world.lone_cell = lone[0]
            if self.state.lone_cell is None:
                set_data_place(self.state, self._place_in(lone[0], lone[1]))
        elif self.state.lone_cell is not None:
            raise ConfigError(
                "XFFL_CELL is set, but not federation.cell; start with xffl exec, which gives it to the configuration, "
                "or unset it"
            )
        super().configure()

    def _place_in(self, cell: int, sizes: tuple[int, ...]) -> DataPlace:
        """Return this rank's place among the ranks of all cells, which get what they would get in one job."""
        mesh = self.world.device_parameters.resolve(sizes)
        dealt = Topology(sum(sizes), sizes, mesh.replica_size, mesh.cell_shape)
        job = DataPlace(self.state.topology, self.world.rank)
        return DataPlace(dealt, dealt.offsets[cell] + self.world.rank, job)

    def lone_cell(self) -> tuple[int, tuple[int, ...]] | None:
        """Return which cell this job is, and the ranks of all cells, as ``federation.cell`` says.

        A cell of an elastic federation knows that from its environment.
        """
        asked = self.section("federation", FederationConfig).cell
        if self.state.elastic is not None:
            if asked is not None:
                raise ConfigError(
                    f"federation.cell is {asked!r}, for rounds over files, but this job is a cell of an elastic "
                    "federation; leave it out"
                )
            return self.state.lone_cell
        if asked is None:
            return None
        cell, cells = parse_cell(asked, "federation.cell")
        sizes = (self.world.world_size,) * cells if isinstance(cells, int) else cells
        if self.state.topology.cells > 1 or sizes[cell] != self.world.world_size:
            raise ConfigError(
                f"federation.cell {asked!r} says that this job is one cell of {sizes[cell]} ranks, but it has "
                f"{self.state.topology.cells} cells and {self.world.world_size} ranks"
            )
        return cell, sizes

    def take_global(self) -> None:
        """Start from the global model of ``federation.start_from``, unless this run has; collective over the world."""
        asked = self.section("federation", FederationConfig)
        if asked.start_from is not None:
            self._take(Path(asked.start_from), asked)
        if asked.cell is not None and asked.round not in (None, self._round_number(asked)):
            raise ConfigError(
                f"federation.round is {asked.round}, but this run, after {self.global_step} steps and "
                f"{asked.start_from or 'the common start'}, is in round {self._round_number(asked)}; give that round, "
                "or the global model of the one before yours"
            )
        if asked.measure_to is not None:
            self._measure(Path(asked.measure_to))

    def _take(self, path: Path, asked: FederationConfig) -> None:
        number, digest = agreed_global(path)
        if number < self._global_round:
            raise ConfigError(
                f"federation.start_from {path} is of round {number}, but this run has started from round "
                f"{self._global_round}; give a newer one, or another experiment.output_dir"
            )
        if number == self._global_round and self._global_digest is not None:
            if digest != self._global_digest:
                raise ConfigError(
                    f"federation.start_from {path} is not the model of round {number} that this run has started from; "
                    "give that one, or another experiment.output_dir"
                )
            return
        trains = asked.cell is not None and asked.measure_to is None
        if trains and asked.steps is not None and self.global_step != number * asked.steps:
            raise StateError(
                f"federation.start_from {path} is of round {number}, before which a cell makes {number * asked.steps} "
                f"steps, but the run in {self.config.experiment.output_dir} has made {self.global_step}; give the "
                "output_dir of its rounds so far, and callbacks a CheckpointCallback, which keeps them. After a round "
                "that ended early (training.max_steps, epochs, early stopping) there is no other"
            )
        model = self.federated_model()
        load_agreed_global(path, model, self.state, policies=self._policies(), only=(number, digest))
        self._global_round = number
        self._global_digest = digest
        self._fresh = self.steps_since_round = 0

    def _measure(self, path: Path) -> None:
        """Measure the model, and write the values; collective over the world."""
        if self.val_dataloader is None:
            raise ConfigError("the model is to be measured, but the trainer has no validation loader; give it one")
        values = {"round": self._global_round, "start": self._global_digest, "metrics": self.perform_validation_epoch()}
        if self.state.rank == 0:
            make_folders(path.parent)
            write_whole(path, json.dumps(values, indent=1) + "\n")

    def _round_number(self, asked: FederationConfig) -> int:
        """Return which round this job is for."""
        is_start = asked.round == 0 and asked.start_from is None and self.global_step == 0
        return 0 if is_start else self._global_round + 1

    @property
    def last_step(self) -> int | None:
        """The optimizer step after which this job's round, which goes over files, is due; ``None`` if there is none."""
        asked = self.section("federation", FederationConfig)
        if asked.measure_to is not None:
            return 0
        if asked.cell is None or (asked.steps is None and asked.round != 0):
            return None
        return self._round_number(asked) * (asked.steps or 0)

    @property
    def has_federation_ended(self) -> bool:
        """Whether all cells together have trained on as many samples as the federation was to; known after rounds."""
        most = self.section("federation", FederationConfig).max_samples
        return most is not None and self._scaling is not None and self.total_weight >= most

    def give_to_round(self) -> None:
        """Export to ``federation.export_to``; collective over the world."""
        asked, lone = self.section("federation", FederationConfig), self.lone_cell()
        if asked.export_to is None or lone is None or asked.measure_to is not None:
            return
        number = self._round_number(asked)
        if number > 0 and self.steps_since_round == 0:
            raise StateError(
                f"the run has ended after {self.global_step} steps, so there are none for round {number}; give "
                "training.max_steps or training.epochs more, or no more rounds"
            )
        export_cell(
            asked.export_to,
            self.federated_model(),
            self.state,
            cell=lone[0],
            cells=len(lone[1]),
            weight=float(self._fresh) if asked.weight == "samples" and number > 0 else None,
            steps=float(self.steps_since_round),
            round=number,
            policies=self._policies(),
            start=self._global_digest,
            plan=asked.plan,
            sizes=lone[1],
        )

    def _policies(self) -> Any:
        return self.section("federation", FederationConfig).aggregator.get("policies")

    def federated_model(self) -> nn.Module:
        """Return the model that rounds average; override it where there are several."""
        models = self.named_models()
        if len(models) != 1:
            raise ConfigError(
                f"the trainer has the models {sorted(models)}; override federated_model to say which one rounds average"
            )
        return next(iter(models.values()))

    def federated_optimizers(self) -> list[Optimizer]:
        """Return the optimizers whose steps are counted: those that train the averaged model."""
        held = set(map(id, sharded_parameters(self.federated_model()).values()))
        optimizers = [
            optimizer
            for optimizer in self.named_optimizers().values()
            if any(id(parameter) in held for group in optimizer.param_groups for parameter in group["params"])
        ]
        return optimizers or list(self.named_optimizers().values())

    def training_rounds(self) -> AbstractContextManager[Any]:
        """Return the context in which rounds take place.

        Entering and leaving it are collective over the world, see :class:`xffl.FederatedScaling`. Rank 0 warns where
        there are several cells and no rounds.
        """
        asked = self.section("federation", FederationConfig)
        if not asked.has_rounds:
            if self.state.topology.cells > 1 and self.state.rank == 0:
                warnings.warn(
                    f"{self.state.topology.cells} cells train models of their own: there are no rounds between them; "
                    "give federation.every or federation.algorithm for rounds",
                    stacklevel=2,
                )
            return nullcontext()
        self._scaling = FederatedScaling(
            self.federated_model(),
            self.federated_optimizers(),
            self.state,
            every=asked.every,
            weight=self.take_samples if asked.weight == "samples" else None,
            on_round=self._on_round,
            aggregator=dict(asked.aggregator),
            delay=asked.delay,
            alpha=asked.alpha,
            client=asked.client,
            moments=asked.moments,
            algorithm=asked.algorithm,
            # A delayed round starts when all of a step is done. Were it under way when the one before it is told of, a
            # checkpoint that is saved then would wait for cells that have not come to it.
            # What the cell joins with is loaded in the block: see take_place.
            hooks=LoopHooks(tell=self._tell_cells, defers_start=lambda: True, defers_join=lambda: True),
        )
        return self._scaling

    def perform_validation_epoch(self, over: str = "cell") -> dict[str, float]:
        """Measure the models on the validation data, and keep what the other cells of an elastic run hear of it."""
        self._untold = metrics = super().perform_validation_epoch(over)
        self._validations += 1
        return metrics

    def _tell_cells(self) -> dict[str, Any]:
        """Return what this cell tells the others of an elastic run at each round."""
        message: dict[str, Any] = {"ranks": self.world.world_size}
        if self._untold is not None:
            message |= {"metrics": dict(self._untold), "validation": self._validations}
        if self.stopped_cells is not None:
            message["stopped"] = self.stopped_cells
        return message

    _rounds_before: int = 0
    """Rounds before those that the aggregator has counted: those before a start that has left its state out"""
    _weight_before: float = 0.0
    """The weight of all cells in those rounds"""

    @property
    def total_weight(self) -> float:
        """Sum of the weights that all cells had in all rounds of the run, also before a change of cells."""
        return self._weight_before + (0.0 if self._scaling is None else self._scaling.total_weight)

    def on_resumed(self) -> None:
        """Count rounds and their samples on, also where ``experiment.reset`` has left the rounds' own state out."""
        scaling = self._scaling
        if scaling is not None and self.lone_cell() is None:
            self._rounds_before = max(0, self.rounds - scaling.aggregator.rounds)
            self._weight_before = max(0.0, self._saved_weight - scaling.total_weight)
        super().on_resumed()

    _saved_weight: float = 0.0

    def counters(self) -> dict[str, float]:
        """Add the weight of all cells in all rounds, where the run ends by it."""
        counters = super().counters()
        asked = self.section("federation", FederationConfig)
        if asked.max_samples is not None and self._scaling is not None and self.lone_cell() is None:
            counters["total_weight"] = self.total_weight
        return counters

    def load_counters(self, state: Mapping[str, float]) -> None:
        """Take it over."""
        super().load_counters(state)
        self._saved_weight = float(state.get("total_weight", 0.0))

    def _on_round(self, report: RoundReport) -> None:
        """Note what the other cells know now, and pass the report on, with the number of the round in the run."""
        if self._rounds_before:
            report = replace(report, round=report.round + self._rounds_before)
        lone = self.lone_cell()
        if isinstance(report, ElasticRoundReport) and lone is not None:
            message = report.told[report.cells.index(lone[0])]
            if message.get("validation") == self._validations:  # else it has validated since, behind a delayed round
                self._untold = None
        self.note_round(report)

    def note_batch(self, count: int) -> None:
        """Count a batch's samples for the next round."""
        self._fresh += count
        super().note_batch(count)

    def take_samples(self) -> float:
        """Return the samples that this rank has seen since the last call: its weight in the next round."""
        count = self._fresh
        self._fresh = 0
        return float(count)

    def find_rounds(self) -> FederatedScaling | None:
        """Return what runs rounds."""
        return self._scaling

    def settle_round(self) -> None:
        """Merge the round that is under way, if any; collective over the world."""
        if self._scaling is not None:
            self._scaling.settle()

    def local_tensors(self) -> set[str]:
        """Return what is trained and not averaged: by its policy, or in a model that is in no round."""
        averaged = self.federated_model()
        policies = self._policies()
        return {
            f"{name}/{entry.name}"
            for name, model in self.named_models().items()
            for entry in Manifest(model, policies if model is averaged else None).entries
            if entry.tensor().requires_grad and (entry.policy == "local" or model is not averaged)
        }

    def own_parts(self) -> dict[str, Any]:
        """Return the rounds' state: server optimizer, residuals of codecs, steps since the last round."""
        parts, lone, scaling = super().own_parts(), self.lone_cell(), self._scaling
        if lone is not None and self.state.elastic is None:
            parts["lone_cell"] = StatePart(lambda: self._lone_state(lone[0]), partial(self._load_lone, lone[0]))
        elif scaling is not None:
            parts["rounds"] = StatePart(
                lambda: {"samples": self._fresh, "scaling": scaling.state_dict()}, self._load_rounds
            )
        return parts

    def _lone_state(self, cell: int) -> dict[str, Any]:
        return {"samples": self._fresh, "round": self._global_round, "start": self._global_digest, "cell": cell}

    def _load_lone(self, cell: int, state: Mapping[str, Any]) -> None:
        if cell != state["cell"]:
            raise ConfigError(
                f"this job is cell {cell}, but the run in {self.config.experiment.output_dir} is that of cell "
                f"{state['cell']}; give another experiment.output_dir"
            )
        self._fresh = int(state["samples"])
        self._global_round = int(state["round"])
        self._global_digest = state["start"]

    def _load_rounds(self, state: Mapping[str, Any]) -> None:
        assert self._scaling is not None, "a part of this name is kept where there are rounds"
        self._scaling.load_state_dict(state["scaling"])
        self._fresh = int(state["samples"])
