"""Options that there were once: a configuration that has them still works, an explicit argument is refused by name."""

from __future__ import annotations

import warnings

import pytest
import torch

import xffl
from tests.unit.test_global_model import make
from xffl.aggregation.options import refuse_removed
from xffl.aggregation.rounds.config import RoundArguments
from xffl.aggregation.rounds.given_config import validate_round_config
from xffl.training.mixins.federated import FederationConfig


@pytest.mark.parametrize("rank", [0, 1])
def test_a_configuration_of_before_is_read_without_who_steps(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = FederationConfig(every=4, aggregator={"server_step": "owner", "codec": "int8"})
        assert config.aggregator == {"codec": "int8"}
        told = capsys.readouterr().err
        assert FederationConfig(every=4, aggregator={"codec": "int8"}).aggregator == {"codec": "int8"}
        assert capsys.readouterr().err == ""
    line = "xffl: federation.aggregator: server_step is ignored: each rank "
    assert told.startswith(line) and told.count("\n") == 1 if rank == 0 else told == ""


def test_an_argument_for_who_steps_is_refused_by_name() -> None:
    asked = RoundArguments(
        every=4, aggregator={"server_step": "owner"}, delay=None, alpha=None, client=None, algorithm=None
    )
    with pytest.raises(xffl.ConfigError, match="^aggregator option 'server_step' is gone: each rank [^\n]*$"):
        validate_round_config(asked)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sever'"):
        refuse_removed(["sever"])


def test_parts_that_owners_have_saved_are_refused_in_one_line() -> None:
    model = make((2, 2))
    saved = {**model.state_dict(), "owned": {"big": [[0, 4]]}}
    with pytest.raises(xffl.CheckpointError, match="^the state of the server was saved in parts[^\n]*$"):
        model.load_state_dict(saved)
    whole = {name: torch.zeros_like(values) for name, values in model.state_dict()["model"].items()}
    model.load_model(whole)
