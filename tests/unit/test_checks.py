"""Public integers: whatever has an index is taken, with the draws and the text of the ``int``; booleans are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from xffl.aggregation.algorithms.every_steps import schedule_of
from xffl.aggregation.algorithms.robust import GeometricMedian, MultiKrum
from xffl.aggregation.algorithms.schedules import EveryEpochs, PerCell, Warmup
from xffl.aggregation.bench import Effort
from xffl.aggregation.compression import Blockwise
from xffl.aggregation.federations.hierarchical import read_levels
from xffl.aggregation.options import Options
from xffl.aggregation.privacy import Accountant, Privacy, SecureSum
from xffl.aggregation.rounds.config import RoundArguments
from xffl.aggregation.rounds.given_config import validate_round_config
from xffl.checkpoint import CheckpointManager
from xffl.checks import decimal, integer, one_of, real
from xffl.cluster.environment import detect_environment
from xffl.cluster.slurm.submit import SlurmConfig
from xffl.distributed.distributed_state import create_device_mesh
from xffl.distributed.parameters import DeviceParameters
from xffl.errors import ConfigError, XfflError
from xffl.parallel.config import DDPConfig, DistributedConfig, TrainingConfig
from xffl.planning.forecast import Link, forecast_round
from xffl.planning.memory import ModelSize
from xffl.topology import DataPlace, Topology
from xffl.training import CellLoader, CellStream, validation_loader
from xffl.training.callbacks import CheckpointCallback, EarlyStoppingCallback, EMACallback, ProfilerCallback
from xffl.training.config.dataclasses import ExperimentConfig, LaunchConfig, TrainingParameters
from xffl.training.config.settings import to_plain
from xffl.training.data import partition
from xffl.training.mixins.federated import FederationConfig
from xffl.training.mixins.loaders import DataConfig

WORLD = Topology(4, 2)
PLACE = DataPlace(WORLD, 1)
DATA = TensorDataset(torch.arange(40))


class Noisy(list[int]):
    """Samples that draw from torch's generator as they are read."""

    def __getitem__(self, index: Any) -> Any:
        return torch.rand(()) + index


def batches(loader: Any) -> str:
    return repr([np.asarray(batch[0] if isinstance(batch, list) else batch).tolist() for batch in loader])


def plain_options(**given: Any) -> Options:
    keywords = {"atomic": True, "nonfinite": "reject", "form": "auto", "rails": False, "overlap": False, "norms": False}
    numbers = {"bucket_bytes": 2, "fragments": 2}
    lists: dict[str, Any] = {"combine": "mean", "server": None, "privacy": None, "secure": False}
    return Options.of(**lists, **{**keywords, **numbers, **given})


MAKE: dict[str, Callable[[Any], Any]] = {
    "integer": lambda two: integer("x", two),
    "world size": lambda two: asdict(Topology(two)),
    "federated sizes": lambda two: asdict(Topology(4, (two, 2), two)),
    "cell shape": lambda two: asdict(Topology(4, 4, None, {"dp_replicate": -1, "tp": two})),
    "rank": lambda two: (WORLD.coordinates(two), WORLD.groups_of(two), WORLD.federation(integer("x", two) - 1)),
    "place in a cell": lambda two: Topology(6, 6, 2).rank_of(0, two, 1),
    "mesh": lambda two: create_device_mesh((two, two)),
    "place": lambda two: detect_environment(
        {}, rank=1, world_size=two, node_local_rank=1, node_local_size=two, master_addr="::1", master_port=29500
    ),
    "partition": lambda two: (
        (one := partition.dirichlet(np.arange(40) % 3, two, alpha=1.0, seed=two, minimum=two)).digest,
        one.method,
    ),
    "loader": lambda two: batches(CellLoader(Noisy(range(40)), DataPlace(WORLD, two), batch_size=two, seed=two)),
    "stream": lambda two: batches(CellStream(Noisy(range(40)), PLACE, batch_size=two, seed=two, part="own")),
    "validation": lambda two: batches(validation_loader(Noisy(range(40)), PLACE, batch_size=two, seed=two)),
    "loader's state": lambda two: CellLoader(DATA, PLACE, batch_size=two, seed=two).state_dict(),
    "schedules": lambda two: (schedule_of(two), EveryEpochs(two, (two, 3)), PerCell([two, 3]), Warmup(two, two, two)),
    "plan": lambda two: validate_round_config(RoundArguments(3, {}, two, None, None, None)),
    "federation": lambda two: to_plain(FederationConfig(every=two)),
    "delay": lambda two: to_plain(FederationConfig(every=3, delay=two)),
    "aggregator": lambda two: plain_options(bucket_bytes=two, fragments=two),
    "levels": lambda two: read_levels([{}, {"every": two, "groups": (two, two)}], {}),
    "combiners": lambda two: (MultiKrum(faulty=two, selected=two), GeometricMedian(iterations=two)),
    "codec": lambda two: (repr(one := Blockwise(bits=8, block=two)), str(one)),
    "privacy": lambda two: (Privacy(1.0, 1.0, seed=two), SecureSum(fraction_bits=two)),
    "mesh sizes": lambda two: DeviceParameters(tp=two, pp=two, pp_micro_batches=two),
    "configuration": lambda two: to_plain(
        [
            TrainingConfig(batch_size=two, gradient_accumulation=two),
            TrainingParameters(epochs=two, max_steps=two, log_every=two, validate_every_steps=two),
            ExperimentConfig(seed=two),
            DDPConfig(powersgd_rank=two, powersgd_start=two),
            DistributedConfig(federated=(two, two), zero_stage=two),
            DataConfig(workers=two, validation_batch_size=two),
        ]
    ),
    "callbacks": lambda two: to_plain(
        [
            EMACallback(every=two, start=two),
            EarlyStoppingCallback(metric="val/loss", patience=two),
            ProfilerCallback(wait=two, repeat=two),
            CheckpointCallback(save_frequency=two, keep_last_n=two),
        ]
    ),
    "manager": lambda two: vars(CheckpointManager("", two, keep_every=two)),
    "job": lambda two: (SlurmConfig(nodes=two, signal_s=two), LaunchConfig(processes=two, hsdp=two)),
    "bench": lambda two: Effort(repeats=two, warmup=two),
    "forecast": lambda two: forecast_round(
        WORLD, parameters=1e6, bytes_per_parameter=4, link=Link(1.0, 0.0), home=Link(1.0, 0.0), step_s=1.0, every=3,
        fragments=two, delay=two, bucket_bytes=two,
    ),
    "model": lambda two: ModelSize(parameters=1e6, layers=two, width=two),
}  # fmt: skip


@pytest.mark.parametrize("name", MAKE)
def test_whatever_has_an_index_is_the_same_integer(name: str) -> None:
    make = MAKE[name]
    expected = repr(make(2))
    for two in (np.int64(2), np.uint8(2), torch.tensor(2), torch.tensor(2, dtype=torch.int32)):
        assert repr(make(two)) == expected, type(two)  # as text, in which an integer of numpy would show


@pytest.mark.parametrize("name", MAKE)
def test_switches_and_fractions_are_no_integers(name: str) -> None:
    make = MAKE[name]
    for wrong in (True, np.True_, torch.tensor(True), 2.0, np.float32(2.0), torch.tensor(2.0)):
        with pytest.raises(XfflError):
            make(wrong)


def test_a_message_has_the_value_and_the_rule() -> None:
    told = {
        (None, None): "every must be an integer, got 'x'; give steps",
        (0, None): "every must be an integer of 0 or more, got 'x'; give steps",
        (1, None): "every must be a positive integer, got 'x'; give steps",
        (3, None): "every must be an integer of 3 or more, got 'x'; give steps",
        (3, 9): "every must be an integer from 3 to 9, got 'x'; give steps",
    }
    for (least, most), text in told.items():
        with pytest.raises(ConfigError) as found:
            integer("every", "x", least, most, hint="give steps")
        assert str(found.value) == text
    assert integer("x", -5, None) == -5 and integer("x", 9, 3, 9) == 9
    for wrong in (2, 10):
        with pytest.raises(ConfigError, match="from 3 to 9, got"):
            integer("x", wrong, 3, 9)


def test_counts_of_exchanges() -> None:
    pytest.importorskip("opacus")
    spent = []
    for three in (3, np.int64(3)):
        one = Accountant(Privacy(1.0, 1.0, where="sum"))
        one.spend(three, three)
        spent.append((repr(one._spent), one.epsilon(colluding=three - 2)))
    assert spent[0] == spent[1]


class Backend(str):
    """A text of a type of its own, as torch's."""


def refusal(value: object, choices: tuple[object, ...]) -> str:
    """Return why a value is refused; empty where it is not."""
    try:
        one_of("what", value, choices)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("value", "choices", "told"),
    [
        *((value, ("gloo", True, 1), "") for value in ("gloo", Backend("gloo"), True, 1)),
        (1, (True, False), "what must be one of True, False, got 1"),
        (True, (1, 2), "what must be one of 1, 2, got True"),
        ("glooo", ("gloo", "nccl"), "what must be one of 'gloo', 'nccl', got 'glooo' (did you mean 'gloo'?)"),
        (None, ("gloo",), "what must be one of 'gloo', got None"),
    ],
)
def test_only_the_choices_are_accepted(value: object, choices: tuple[object, ...], told: str) -> None:
    assert refusal(value, choices) == told


def test_only_digits_of_ascii_write_numbers() -> None:
    others = ("\uff19", "\u0664\u0662", "1\uff12", "\u00b2")
    assert decimal("12") == 12 and [decimal(text) for text in (*others, "", "-1", "9" * 19)] == [None] * 7
    assert real("1.5e3") == 1500 and [real(text) for text in (*others, "", "x")] == [None] * 6
