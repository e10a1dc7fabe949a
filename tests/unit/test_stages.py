"""Which part of a model a stage keeps, for every number of stages, and what cannot be split."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.decoder import Decoder, text_batch
from xffl.errors import ConfigError
from xffl.parallel.pipeline import Skip, split_model


def test_splitting() -> None:
    whole_names = [name for name, _ in Decoder(layers=7).named_parameters()]
    for stages in range(1, 8):
        with torch.device("meta"):
            parts = [split_model(Decoder(layers=7), stage, stages) for stage in range(stages)]
        assert [name for part in parts for name, _ in part.named_parameters()] == whole_names
        sizes = [len(part.layers) for part in parts]
        loads = [size + (index == 0) + (index == stages - 1) for index, size in enumerate(sizes)]
        assert min(sizes) >= 1 and max(loads) <= max(2, math.ceil(9 / stages))


def test_wrong_splits() -> None:
    def split(model: nn.Module | None = None, stage: int = 0, stages: int = 2) -> nn.Module:
        return split_model(Decoder() if model is None else model, stage, stages)

    for call, text in (
        ({"stages": 5}, "5 stages cannot share 4 layers; give at most 4"),
        ({"stage": 2}, "stage 2 of 2 does not exist"),
        ({"stages": 0}, "stage 0 of 0 does not exist"),
    ):
        with pytest.raises(ConfigError, match=text):
            split(**call)
    with pytest.raises(ConfigError, match="Linear has 0 largest lists"):
        split(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="2 largest lists of modules of one class: 0, 1;"):
        split(nn.Sequential(*(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2)), nn.Linear(2, 2)))

    tied = Decoder()
    tied.lm_head.weight = tied.embed_tokens.weight
    with pytest.raises(ConfigError, match="'embed_tokens.weight' and 'lm_head.weight' are one tied parameter"):
        split(tied)
    assert split(tied, stages=1) is tied and not any(isinstance(part, Skip) for part in tied.modules())
    alike = Decoder()
    alike.layers["3"].mlp = alike.layers["0"].mlp
    with pytest.raises(ConfigError, match="lie on stages 0 and 1"):
        split(alike)
    loose = Decoder()
    loose.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match="parameter 'scale' belongs to no stage"):
        split(loose)
    with pytest.raises(ConfigError, match="torch.int64 values instead of the hidden state"):
        split(stage=1)(text_batch(0)[0])
