"""What device parameters and strategies' configurations accept, and what they say of what they do not."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xffl.distributed.parameters import AXES, CommParameters, DeviceParameters
from xffl.errors import ConfigError
from xffl.parallel import (
    STRATEGIES,
    DDPStrategy,
    DistributedStrategy,
    FSDPStrategy,
    HSDPStrategy,
    SingleGPUStrategy,
    SingleStrategy,
    read_config,
)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tp": 0}, "tp must be a positive integer, got 0"),
        ({"pp": -1}, "pp must be a positive integer, got -1"),
        ({"cp": 1.5}, "cp must be a positive integer, got 1.5"),
        ({"dp_shard": True}, "dp_shard must be a positive integer, got True"),
        ({"dp_shard": "all"}, "dp_shard must be a positive integer, got 'all'; give at least 1, or auto"),
        ({"dp_shard": "auto", "dp_replicate": "auto"}, "dp_replicate and dp_shard are all 'auto'"),
        ({"param_dtype": "int8"}, "param_dtype must be one of 'float32', 'bfloat16', 'float16', got 'int8'"),
        ({"reduce_dtype": None}, "reduce_dtype must be one of .* got None"),
        (
            {"activation_checkpointing": "all"},
            "activation_checkpointing must be one of 'none', .* got 'all'",
        ),
        ({"pp": 2, "pp_schedule": "zb"}, "pp_schedule must be one of '1f1b', 'gpipe', got 'zb'"),
        ({"compile": "yes"}, "compile must be one of True, False, got 'yes'"),
        ({"pp_micro_batches": 4}, "pp_micro_batches 4 are a pipeline's, but pp is 1"),
        ({"pp": 2, "pp_micro_batches": 0}, "pp_micro_batches must be a positive integer, got 0; give at least 1"),
        ({"cpu_offload": True}, "cpu_offload is FSDP's"),
        ({"reduce_dtype": "bfloat16"}, "reduce_dtype 'bfloat16' is FSDP's"),
        ({"loss_parallel": True}, "loss_parallel cuts logits over tp, which is 1"),
        ({"pp": 2, "param_dtype": "float16"}, "param_dtype 'float16' needs a gradient scaler"),
        ({"comm": 600}, "comm must be a CommParameters, which holds timeouts, got 600"),
    ],
)
def test_parameters_that_cannot_be_meant(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DeviceParameters(**asked)


def test_defaults_and_what_fits_together() -> None:
    plain = DeviceParameters()
    assert plain.reshard_after_forward and plain.sequence_parallel and plain.comm.init_timeout_seconds == 600
    assert DeviceParameters(cp=2, cpu_offload=True).cpu_offload


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), "10", None, True])
def test_timeouts(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=r"comm\.init_timeout_seconds must be a number > 0, got "):
        CommParameters(init_timeout_seconds=seconds)


@pytest.mark.parametrize(
    ("asked", "cells", "said"),
    [
        ({"dp_shard": 3}, (4,), r"dp_shard=3 multiply to 3, but the world has 4 ranks; .* or one 'auto'"),
        ({"tp": 3, "dp_shard": "auto"}, (4,), "the world has 4 ranks, which 3 does not divide"),
        ({}, (4,), "all sizes 1 multiply to 1, but the world has 4 ranks"),
        ({"dp_shard": 2}, (2, 4), "multiply to 2, but cell 1 has 4 ranks"),
        ({"dp_shard": "auto", "tp": 2}, (4, 8), "meshes that differ in more than their replicas"),
        ({"dp_shard": "auto", "dp_replicate": 2}, (4, 8), "meshes that differ in more than their replicas"),
        ({"pp": "auto"}, (2, 4), "meshes that differ in more than their replicas"),
    ],
)
def test_sizes_that_do_not_fit(asked: dict[str, Any], cells: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DeviceParameters(**asked).resolve(cells)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    auto=st.sampled_from([None, *AXES]),
    cells=st.integers(1, 4),
)
def test_sizes_that_fit(sizes: list[int], auto: str | None, cells: int) -> None:
    asked = dict(zip(AXES, sizes, strict=True))
    ranks = 1
    for size in sizes:
        ranks *= size
    mesh = DeviceParameters(**{**asked, **({auto: "auto"} if auto else {})}).resolve((ranks,) * cells)
    assert mesh.axes == asked
    is_data_parallel = asked["pp"] == asked["cp"] == asked["tp"] == 1
    if is_data_parallel and asked["dp_replicate"] == 1 and auto != "dp_replicate":
        assert mesh.replica_size is None
    else:
        assert mesh.replica_size == ranks // asked["dp_replicate"]
    assert mesh.cell_shape == (None if is_data_parallel else asked)


def test_presets_and_their_strategies() -> None:
    assert DeviceParameters.SINGLE_DEVICE().strategy == "single"
    assert DeviceParameters.DDP().strategy == "ddp"
    assert DeviceParameters.FSDP(tp=2).strategy == "fsdp"
    assert DeviceParameters.HSDP(dp_shard=4).strategy == "hsdp"
    assert DeviceParameters.HSDP(dp_shard=4).resolve((8, 4)).axes["dp_replicate"] == -1
    assert DeviceParameters.HSDP(dp_shard=4).resolve((8, 4)).replica_size == 4
    assert DeviceParameters.FSDP().resolve((8, 4)).replica_size is None
    assert DeviceParameters(cp=2).strategy == "fsdp"
    assert DeviceParameters(tp=2).strategy == "fsdp"
    assert DeviceParameters(pp=2, dp_replicate=2).strategy == "hsdp"


def test_strategies_by_name() -> None:
    expected = {"single": SingleStrategy, "ddp": DDPStrategy, "fsdp": FSDPStrategy}
    for name, kind in expected.items():
        assert type(DistributedStrategy.from_config({"distributed": {"strategy": name}})) is kind
    hsdp = {"strategy": "hsdp", "device_parameters": {"dp_shard": 2, "dp_replicate": "auto"}}
    assert type(DistributedStrategy.from_config({"distributed": hsdp})) is HSDPStrategy
    assert SingleGPUStrategy is SingleStrategy
    assert {"single", "ddp", "fsdp", "hsdp"} <= set(STRATEGIES)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"distributed": {"strategy": "fdsp"}}, r"strategy must be one of .*, got 'fdsp' \(did you mean 'fsdp'\?\)"),
        ({"distributed": {"strategy": None}}, "strategy must be one of .*, got None"),
        (
            {"distributed": {"stategy": "fsdp"}},
            "distributed option must be .*, got 'stategy' .*did you mean 'strategy'",
        ),
        ({"training": {}}, "has no 'distributed'"),
        ({"distributed": {"strategy": "hsdp"}}, "needs device_parameters, such as"),
        (
            {"distributed": {"strategy": "ddp", "device_parameters": {"dp_shard": 2}}},
            "strategy 'ddp' does not do what the sizes ask for; give strategy='fsdp'",
        ),
        (
            {"distributed": {"device_parameters": {"tq": 2}}},
            "device_parameters option must be .*, got 'tq' .*did you mean 'tp'",
        ),
        ({"distributed": {"ddp": {"communication_hook": "bf17"}}}, "communication_hook .* got 'bf17' .*mean 'bf16'"),
        ({"distributed": {"ddp": {"powersgd_rank": 0}}}, "powersgd_rank must be a positive integer, got 0"),
        ({"distributed": {"ddp": {"powersgd_start": 1}}}, "powersgd_start must be an integer of 2 or more, got 1"),
        ({"distributed": {"wrap": int}}, "options of distributed cannot be read"),
        ({"distributed": {"wrap": ["Block"]}}, "wrap must be layer classes"),
        ({"distributed": {"ddp": SimpleNamespace(communication_hook="fp61")}}, "did you mean 'fp16'"),
        ({"distributed": {"ddp": {"powersgd_rank": "2"}}}, "powersgd_rank must be a positive integer, got '2'"),
        ({"distributed": {"device_parameters": {"comm": {"timeout": 3}}}}, "comm option must be .*, got 'timeout'"),
        (
            {"distributed": {"strategy": "fsdp", "device_parameters": {"dp_shard": 2, "compile": True}}},
            "compile goes layer by layer, but distributed.wrap names no layer class",
        ),
        (
            {
                "distributed": {"strategy": "ddp", "ddp": {"static_graph": True}},
                "training": {"gradient_accumulation": 2},
            },
            "static_graph=True does not accumulate",
        ),
        ({"distributed": {"zero_stage": 4}}, "zero_stage must be an integer from 0 to 3, got 4"),
        ({"distributed": {}, "training": {"batch_size": 0}}, "training.batch_size must be a positive integer, got 0"),
        (
            {"distributed": {}, "training": {"gradient_accumulation": 2.0}},
            "training.gradient_accumulation must be a positive integer, got 2.0",
        ),
        (
            {"distributed": {}, "training": {"mixed_precision": "fp8"}},
            "mixed_precision must be one of 'no', 'bf16', .*got 'fp8'",
        ),
        ({"distributed": {}, "training": {"max_grad_norm": -1.0}}, "max_grad_norm must be a number > 0, got -1.0"),
        (
            {
                "distributed": {"device_parameters": {"param_dtype": "float16"}},
                "training": {"mixed_precision": "bf16"},
            },
            "mixed_precision 'bf16' and param_dtype 'float16' differ",
        ),
    ],
)
def test_configurations_that_cannot_be_meant(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DistributedStrategy.from_config(config)


def test_configurations_of_other_makes() -> None:
    @dataclass
    class Training:
        batch_size: int = 8
        gradient_accumulation: int = 2
        learning_rate: float = 0.1
        mixed_precision: str = "bf16"

    @dataclass
    class Mine:
        training: Training = field(default_factory=Training)
        distributed: Any = field(default_factory=lambda: SimpleNamespace(strategy="fsdp", zero_stage=3))
        seed: int = 0

    found = read_config(Mine())
    assert (found.training.batch_size, found.training.gradient_accumulation) == (8, 2)
    assert (found.distributed.strategy, found.distributed.zero_stage) == ("fsdp", 3)
    assert read_config(found) is found
    timeouts = {"strategy": "fsdp", "device_parameters": {"dp_shard": "auto", "comm": {"train_timeout_seconds": 60}}}
    asked = read_config({"distributed": timeouts}).distributed.device_parameters
    assert asked is not None and asked.comm.train_timeout_seconds == 60
    assert DistributedStrategy.from_config(Mine()).device_parameters.param_dtype == "bfloat16"
