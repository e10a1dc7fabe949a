"""Every strategy with one process and no launcher, and what goes wrong before there is a world."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.decoder import Block, Decoder, loss_of, text_batch
from tests.ranks.test_strategies import configure, full_weights
from xffl.cluster.hardware import pick_gpu
from xffl.cluster.launch.local import launch_distributed
from xffl.distributed import DeviceParameters
from xffl.parallel import DistributedStrategy, shard
from xffl.training.mixins.state import StateMixin

ALONE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "single": ("single", {}, {}),
    "ddp": ("ddp", {"dp_replicate": "auto"}, {}),
    "fsdp": ("fsdp", {"dp_shard": "auto"}, {"wrap": (Block,)}),
    "hsdp": ("hsdp", {"dp_shard": 1, "dp_replicate": "auto"}, {}),
    "recomputed": ("fsdp", {"dp_shard": "auto", "activation_checkpointing": "selective"}, {"wrap": (Block,)}),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_strategy_with_one_process_is_a_plain_loop(name: str) -> None:
    strategy_name, mesh, options = ALONE[name]
    torch.manual_seed(0)
    plain = Decoder()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in range(3):
        tokens, targets = text_batch(step)
        loss_of(plain(tokens), targets).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with DistributedStrategy.from_config(configure(strategy_name, mesh, options)) as strategy:
        assert (strategy.rank, strategy.world_size, strategy.local_rank, strategy.is_main_process) == (0, 1, 0, True)
        torch.manual_seed(0)
        model = strategy.wrap_model(Decoder(), loss=loss_of)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for tokens, targets in strategy.micro_batches(map(text_batch, range(3)), model):
            strategy.forward_backward(model, tokens, target=targets)
            strategy.clip_grad_norm(model, 0.5)
            strategy.step(optimizer)
        weights = full_weights(model)
    assert not dist.is_initialized()
    for key, values in full_weights(plain).items():
        assert (weights[key] - values).abs().max() < 1e-6, key


def test_bfloat16_stays_close_to_float32() -> None:
    losses = {}
    for precision in ("no", "bf16"):
        with DistributedStrategy.from_config(configure("single", {}, {}, mixed_precision=precision)) as strategy:
            torch.manual_seed(0)
            model = strategy.wrap_model(Decoder(), loss=loss_of)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for step in range(5):
                loss = strategy.forward_backward(model, text_batch(step)[0], target=text_batch(step)[1])
                strategy.step(optimizer)
            losses[precision] = loss.item()
            assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert 0 < abs(losses["bf16"] - losses["no"]) < 0.02


def test_a_trainer_has_loaded_what_is_deleted_right_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_and_lose(*args: Any, **options: Any) -> dict[str, Any]:
        values = load_it(*args, **options)
        shutil.rmtree(tmp_path / "it")  # as another run does that keeps fewer checkpoints
        return values

    with DistributedStrategy.from_config(configure("single", {}, {})) as strategy:
        models = {"model": strategy.wrap_model(Decoder(), loss=loss_of)}
        strategy.save_checkpoint(tmp_path / "it", models, {}, step=3)
        load_it = strategy.load_checkpoint
        monkeypatch.setattr(strategy, "load_checkpoint", load_and_lose)
        trainer = SimpleNamespace(
            strategy=strategy,
            named_models=lambda: models,
            named_optimizers=dict,
            _others=dict,
            own_parts=dict,
            local_tensors=list,
            config=SimpleNamespace(experiment=SimpleNamespace(reset=False)),
            run_directory=SimpleNamespace(cell=1),
            samples=9,
            on_resumed=lambda: None,
            callbacks=SimpleNamespace(post_load_checkpoint=lambda *_: None),
        )
        assert StateMixin.load_checkpoint(trainer, tmp_path / "it") == {"step": 3}  # type: ignore[arg-type]
        assert trainer.samples == 0  # those were of the only cell that was saved


def test_resuming_a_strategy_equals_never_having_stopped(tmp_path: Path) -> None:
    def run(steps: range, *, save: str | None = None, load: str | None = None) -> dict[str, torch.Tensor]:
        config = configure("fsdp", {"dp_shard": "auto"}, {}, mixed_precision="fp16")
        with DistributedStrategy.from_config(config) as strategy:
            torch.manual_seed(7 if load is None else 8)
            model = strategy.wrap_model(Decoder(), loss=loss_of)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if load is not None:
                assert strategy.load_checkpoint(tmp_path / load, model, optimizer) == {"step": 2, "note": "half"}
                assert strategy._parts({"model": model}, {})["loss_scale"].state_dict()["steps"] == 2
            for step in steps:
                tokens, targets = text_batch(step)
                strategy.forward_backward(model, tokens, target=targets)
                assert strategy.step(optimizer)
            if save is not None:
                strategy.save_checkpoint(tmp_path / save, model, optimizer, step=steps.stop, note="half")
            return full_weights(model)

    run(range(2), save="half")
    resumed, straight = run(range(2, 4), load="half"), run(range(4))
    assert all(torch.equal(resumed[key], values) for key, values in straight.items())
    with pytest.raises(xffl.CheckpointError, match="none does not exist"):
        run(range(1), load="none")


@pytest.mark.parametrize("kind", ["single", "ddp", "fsdp"])
def test_a_strategy_loads_into_what_it_has_wrapped(kind: str, tmp_path: Path) -> None:
    config = {"distributed": {"strategy": kind}}
    with DistributedStrategy.from_config(config) as strategy:
        model = strategy.wrap_model(nn.Linear(3, 2))
        optimizer = strategy.wrap_optimizer(model, torch.optim.Adam(model.parameters(), lr=0.5))
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        strategy.save_checkpoint(tmp_path / "both", model, optimizer, step=7)
        kept, moments = full_weights(model), optimizer.state_dict()["state"][0]["exp_avg"].clone()
    with DistributedStrategy.from_config(config) as strategy:
        with pytest.raises(xffl.StateError, match="no model to load into; call wrap_model first"):
            strategy.load_checkpoint(tmp_path / "both")
        model = strategy.wrap_model(nn.Linear(3, 2))
        with pytest.raises(xffl.CheckpointError, match=r"\['optimizer'\] were not asked for"):
            strategy.load_checkpoint(tmp_path / "both")
        optimizer = strategy.wrap_optimizer(model, torch.optim.Adam(model.parameters()))
        assert strategy.load_checkpoint(tmp_path / "both") == {"step": 7}
        assert all(torch.equal(full_weights(model)[name], kept[name]) for name in kept)
        state = optimizer.state_dict()
        assert torch.equal(state["state"][0]["exp_avg"], moments) and state["param_groups"][0]["lr"] == 0.5
        other = strategy.wrap_optimizer(model, torch.optim.Adam(model.parameters()))
        with pytest.raises(xffl.ConfigError, match="has wrapped several optimizers"):
            strategy.load_checkpoint(tmp_path / "both")
        assert strategy.load_checkpoint(tmp_path / "both", optimizer=other) == {"step": 7}
        second = strategy.wrap_model(nn.Linear(3, 2))
        with pytest.raises(xffl.ConfigError, match="has wrapped several models"):
            strategy.load_checkpoint(tmp_path / "both")
        assert strategy.load_checkpoint(tmp_path / "both", model, optimizer) == {"step": 7}
        del second, other
        assert strategy.load_checkpoint(tmp_path / "both") == {"step": 7}


def test_a_loss_that_was_not_given() -> None:
    with DistributedStrategy.from_config(configure("single", {}, {})) as strategy:
        model = strategy.wrap_model(Decoder())
        with pytest.raises(xffl.StateError, match=r"give wrap_model\(model, loss=\.\.\.\)"):
            strategy.forward_backward(model, text_batch(0)[0], target=text_batch(0)[1])


def test_readable_errors() -> None:
    """Each names the variable or the argument to set."""
    with pytest.raises(xffl.StateError, match=r"open xffl\.session\(\) or call init_process_group first"):
        shard(nn.Linear(2, 2), xffl.DistributedState())
    strategy = DistributedStrategy.from_config(configure("single", {}, {}))
    with pytest.raises(xffl.StateError, match=r"call setup\(\) first"):
        strategy.wrap_model(nn.Linear(2, 2))
    missing = next(name for name in ("mpi", "nccl", "ucc") if not dist.is_backend_available(name))
    with (
        pytest.raises(xffl.ConfigError, match=f"backend '{missing}' is not in this build of torch .* give 'gloo'"),
        xffl.session(backend=missing),
    ):
        pass
    with pytest.raises(
        xffl.ConfigError, match=r"device .* does not exist: torch sees \d+ GPUs; give another, or 'cpu'"
    ):
        xffl.DistributedWorld(DeviceParameters(), device=f"cuda:{torch.cuda.device_count()}").setup()
    with pytest.raises(xffl.LaunchError, match="4 processes run on this node, but this one sees 2 GPUs; start one"):
        pick_gpu(3, 4, 2, {})
    with pytest.raises(xffl.ConfigError, match=r"hsdp=2 was asked for, but the device parameters make replicas of 1"):
        xffl.distributed.setup_distributed_process_group(hsdp=2, device_parameters=DeviceParameters.DDP())
    with pytest.raises(xffl.ConfigError, match=r"timeout_s must be a number > 0 and < 1e\+09, got -1; give seconds"):
        xffl.distributed.setup_distributed_process_group(join_timeout_s=-1)
    assert not dist.is_initialized()


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
            import xffl
            from xffl.distributed import setup_distributed_process_group
            try:
                setup_distributed_process_group(0, 2, master_addr="127.0.0.1", master_port={port}, timeout_s=5)
            except xffl.LaunchError as error:
                print(error)
            """
        told = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, timeout=120
        ).stdout
    assert f"port {port} of 127.0.0.1 on " in told and "set MASTER_PORT to a port that is free there" in told


def test_launch_distributed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "it's a script.py"
    script.write_text(
        "import os, sys\n"
        "rank = os.environ['RANK']\n"
        "open(os.path.join(sys.argv[1], rank), 'w').write(os.environ['WORLD_SIZE'])\n"
        "sys.exit(int(os.path.exists(os.path.join(sys.argv[1], 'fail'))))\n"
    )
    out = tmp_path / "out"
    out.mkdir()
    launch_distributed(str(script), str(out), gpus_per_node=2)
    assert {path.name: path.read_text() for path in out.iterdir()} == {"0": "2", "1": "2"}
    (out / "fail").touch()
    with pytest.raises(xffl.LaunchError, match="ended with exit code 1"):
        launch_distributed(str(script), str(out), gpus_per_node=1)
    for asked, said in (
        ({"num_nodes": 2}, "2 nodes need a port to meet at; give master_port"),
        ({"gpus_per_node": 0}, "1 nodes of 0 processes are invalid"),
        ({"num_nodes": 2, "master_port": 1}, "NODE_RANK is '' on one of 2 nodes; set it to 0 to 1"),
    ):
        monkeypatch.delenv("NODE_RANK", raising=False)
        with pytest.raises(xffl.LaunchError, match=said):
            launch_distributed(str(script), str(out), **asked)  # type: ignore[arg-type]
    with pytest.raises(xffl.LaunchError, match="does not exist"):
        launch_distributed(os.fspath(tmp_path / "none.py"), "")
