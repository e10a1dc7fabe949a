"""Hugging Face models on cells of any kind: what is read, trained, exchanged and written equals a single process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.tensor import DTensor

import xffl
from tests.worlds import run_world
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.parameters import DeviceParameters
from xffl.distributed.values.sharding import local_tensor
from xffl.errors import XfflError
from xffl.parallel import DistributedConfig, DistributedStrategy, StrategyConfig
from xffl.training import models
from xffl.training.models import weights

pytest.importorskip("transformers")
pytest.importorskip("peft")

RANKS = 4
STEPS = 3
Case = tuple[str, dict[str, Any], tuple[int, ...] | None, str]
CASES: dict[str, Case] = {
    "single and fsdp over 3": ("fsdp", {"dp_shard": "auto"}, (1, 3), "llama"),
    "fsdp": ("fsdp", {"dp_shard": "auto", "activation_checkpointing": "full"}, None, "llama"),
    "fsdp, tied": ("fsdp", {"dp_shard": "auto"}, None, "tied"),
    "ddp": ("ddp", {"dp_replicate": "auto"}, None, "llama"),
    "hsdp": ("hsdp", {"dp_shard": 2, "dp_replicate": 2}, None, "llama"),
    "tensor and replicas, tied": ("hsdp", {"dp_replicate": 2, "tp": 2, "sequence_parallel": False}, None, "tied"),
    "tensor and fsdp, cut sequence": ("fsdp", {"dp_shard": 2, "tp": 2}, None, "llama"),
}
ADAPTED: dict[str, tuple[str, dict[str, Any], tuple[int, int], bool]] = {
    "single and fsdp over 3": ("fsdp", {"dp_shard": "auto"}, (1, 3), True),
    "ddp": ("ddp", {"dp_replicate": "auto"}, (2, 2), False),
}
SAVED = ("single and fsdp over 3", "fsdp, tied", "tensor and fsdp, cut sequence")
SMALL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}


def batch(step: int) -> torch.Tensor:
    """Tokens (12, 8) of a step: each is a few more than the one before."""
    starts = torch.randint(0, 64, (12, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(1, 9) * 5) % 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that transformers has written: in several files, with tied weights, with other values, and broken ones."""
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("models")
    for seed, (name, tied, size) in enumerate(
        [("llama", False, "20KB"), ("tied", True, "1GB"), ("other", False, "1GB"), ("broken", False, "1GB")]
    ):
        torch.manual_seed(seed)
        model: Any = models.causal_lm({**SMALL, "tie_word_embeddings": tied})
        model.save_pretrained(path / name, max_shard_size=size)
    tensors = load_file(path / "broken" / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(32, 48)
    tensors["model.extra"] = torch.zeros(3)
    save_file(tensors, path / "broken" / "model.safetensors")
    return path


def pretrained(folder: Path, **arguments: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **arguments)


def logits_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    was = model.training
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens).logits
    model.train(was)
    return found


def set_up(
    rank: int, mesh: dict[str, Any], strategy: str, federated: tuple[int, ...] | None, model: nn.Module
) -> DistributedStrategy:
    parameters = DeviceParameters(**mesh)
    asked = DistributedConfig(
        strategy=strategy, device_parameters=parameters, wrap=models.layer_classes(model), federated=federated
    )
    made = DistributedStrategy.from_config(StrategyConfig(distributed=asked))
    state = DistributedState()
    state.set_global("gloo", "cpu", None, None, rank, RANKS)
    state.set_node(rank, RANKS, 0, 1)
    made.setup(state)
    return made


def spread(strategy: DistributedStrategy, model: nn.Module, source: Path) -> nn.Module:
    """Let a model on the meta device be spread, and read its weights."""
    made = strategy.wrap_model(model, init_weights=models.ModuleInitializer(model, only_buffers=True))
    models.load_weights(made, source, strategy.state)
    return made


def read_and_train(rank: int, name: str, folder: Path) -> dict[str, Any]:
    kind, mesh, federated, source = CASES[name]
    model = models.causal_lm(folder / source, weights=False)
    strategy = set_up(rank, mesh, kind, federated, model)
    read = count_read()
    model = spread(strategy, model, folder / source)
    held = sum(local_tensor(one.tensor).numel() for one in weights.file_tensors(model))
    # Made before any forward pass, which leaves FSDP2's outermost unit gathered.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    told: dict[str, Any] = {"read": read(), "held": held, "logits": logits_of(model, batch(0))}
    world = strategy.world
    losses = []
    for step in range(STEPS):
        tokens = batch(step).chunk(world.dp_size)[world.dp_rank]
        output = model(input_ids=tokens)
        loss = models.causal_lm_loss(output, tokens)
        strategy.backward(loss)
        strategy.step(optimizer)
        losses.append(world.all_reduce(loss.detach(), "mean", "dp_cp").item())
    told["losses"] = losses
    if name in SAVED:
        models.save_pretrained(model, folder / f"saved {name}", strategy.state, max_shard_size="10KB")
        told["trained"] = logits_of(model, batch(0))
    strategy.teardown()
    return told


def count_read() -> Callable[[], int]:
    """Count the elements that are read from now on; the function returned tells how many, and ends that."""
    commit, found = DefaultLoadPlanner.commit_tensor, []

    def count(self: DefaultLoadPlanner, item: Any, values: torch.Tensor) -> None:
        found.append(values.numel())
        commit(self, item, values)

    DefaultLoadPlanner.commit_tensor = count  # type: ignore[method-assign]

    def end() -> int:
        DefaultLoadPlanner.commit_tensor = commit  # type: ignore[method-assign]
        return sum(found)

    return end


def train_adapters(rank: int, folder: Path, name: str) -> dict[str, Any]:
    """Train adapters in two cells, and average them."""
    kind, mesh, federated, is_bare = ADAPTED[name]
    torch.manual_seed(rank)
    model = models.causal_lm(folder / "llama", weights=not is_bare)
    model = models.add_lora(model, rank=2, alpha=6, target_modules=["q_proj", "down_proj"])
    strategy = set_up(rank, mesh, kind, federated, model)
    model = spread(strategy, model, folder / "llama") if is_bare else strategy.wrap_model(model)
    told: dict[str, Any] = {"first": logits_of(model, batch(0))}
    aggregator = xffl.Aggregator(model, strategy.state)
    cell = strategy.state.topology.cell_of(rank)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(3):
        tokens = batch(10 * cell + step).chunk(strategy.world.dp_size)[strategy.world.dp_rank]
        strategy.backward(models.causal_lm_loss(model(input_ids=tokens), tokens))
        strategy.step(optimizer)
    told["before"] = models.adapter_state(model)
    report = aggregator.aggregate()
    told["bytes"], told["after"] = report.bytes_across, models.adapter_state(model)
    models.agree_on_base(model, strategy.state)
    told["logits"] = logits_of(model, batch(0))
    models.save_adapters(model, folder / f"adapters, {name}", strategy.state)
    models.save_pretrained(model, folder / f"merged, {name}", strategy.state)
    if cell == 1:  # somebody touches the base of one cell
        with torch.no_grad():
            inner = weights.bare_model(model)
            local_tensor(inner.get_parameter("base_model.model.model.norm.weight")).mul_(2)
    told["touched"] = error_of(lambda: models.agree_on_base(model, strategy.state))
    strategy.teardown()
    return told


def read_as_bfloat16(rank: int, folder: Path) -> dict[str, Any]:
    """Read into another data type, with adapters in float32 beside it."""
    model = models.add_lora(models.causal_lm(folder / "llama", dtype="bfloat16", weights=False), rank=2)
    strategy = set_up(rank, {"dp_shard": "auto"}, "fsdp", None, model)
    model = spread(strategy, model, folder / "llama")
    told = {"logits": logits_of(model, batch(0)), "rank": rank}
    models.causal_lm_loss(model(input_ids=batch(0)), batch(0)).backward()
    told["has_gradients"] = [name for name, tensor in model.named_parameters() if tensor.grad is not None]
    strategy.teardown()
    return told


def initialize(rank: int, source: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Make random weights part by part; only rank 0's random numbers count."""
    model = models.causal_lm(source, weights=False)
    strategy = set_up(rank, {"dp_shard": "auto"}, "fsdp", (2, 2), model)
    torch.manual_seed(7 if rank == 0 else rank)
    model = strategy.wrap_model(model, init_weights=models.ModuleInitializer(model))
    found = {name: tensor.full_tensor() for name, tensor in model.named_parameters() if isinstance(tensor, DTensor)}
    strategy.teardown()
    return found


def wrong(rank: int, folder: Path) -> dict[str, str]:
    """What is told where files do not fit, on some ranks or in one cell."""
    model = models.causal_lm(folder / "llama", weights=False)
    strategy = set_up(rank, {"dp_shard": "auto"}, "fsdp", (2, 2), model)
    model = strategy.wrap_model(model, init_weights=models.ModuleInitializer(model, only_buffers=True))
    state = strategy.state

    def load(source: Path) -> Callable[[], None]:
        return lambda: models.load_weights(model, source, state)

    told = {
        "broken": error_of(load(folder / "broken")),
        "broken on one": error_of(load(folder / ("broken" if rank == 2 else "other"))),
        "no folder": error_of(load(folder / "nowhere")),
        "other base": error_of(load(folder / ("other" if rank >= 2 else "broken_not"))),
        "no adapters": error_of(lambda: models.save_adapters(model, folder / "never", state)),
        "other folders": error_of(lambda: models.save_pretrained(model, folder / f"never {rank}", state)),
        "in a file": error_of(lambda: models.save_pretrained(model, folder / "llama" / "config.json", state)),
        "bad size": error_of(lambda: models.save_pretrained(model, folder / "never", state, max_shard_size="many")),
    }
    strategy.teardown()
    return told


def error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except XfflError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def everything(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    assert world_size == RANKS
    told: dict[str, Any] = {name: read_and_train(rank, name, folder) for name in CASES}
    told["adapters"] = {name: train_adapters(rank, folder, name) for name in ADAPTED}
    told["bfloat16"] = read_as_bfloat16(rank, folder)
    told["random"] = initialize(rank, {**SMALL, "tie_word_embeddings": True})
    told["wrong"] = wrong(rank, folder)
    return told


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Any]]:
    """What each rank of one world has found in all cases."""
    # The same shapes with other values, under a name that only two ranks read.
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "other" / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] += 1e-3
    (folder / "broken_not").mkdir()
    save_file(tensors, folder / "broken_not" / "model.safetensors")
    return run_world(RANKS, everything, folder, timeout_s=270)


def train_alone(model: Any) -> list[float]:
    """Train as one process with the whole batch, by transformers' own loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    model.train()
    for step in range(STEPS):
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", CASES)
def test_models_are_read_and_trained_as_by_one_process(name: str, told: list[dict[str, Any]], folder: Path) -> None:
    *_, federated, source = CASES[name]
    model = pretrained(folder / source)
    expected = logits_of(model, batch(0))
    losses = train_alone(model)
    assert losses[-1] < losses[0] - 0.5
    for found in (found[name] for found in told):
        assert (found["logits"] - expected).abs().max() < 1e-6 * expected.abs().max()
        assert "tensor" in name or torch.equal(found["logits"], expected)
        assert found["losses"] == pytest.approx(losses, abs=1e-5)
        # Each rank has read what it holds.
        assert found["read"] == found["held"]
    total = sum(tensor.numel() for tensor in model.parameters())
    assert (
        sum(found[name]["held"] for found in told)
        == {
            "ddp": 4 * total,
            "hsdp": 2 * total,
        }.get(name, (1 if federated is None else 2) * total)
        or "tensor" in name
    )


@pytest.mark.parametrize("name", SAVED)
def test_models_are_written_as_transformers_reads_them(name: str, told: list[dict[str, Any]], folder: Path) -> None:
    *_, source = CASES[name]
    alone = pretrained(folder / source)
    train_alone(alone)
    saved = folder / f"saved {name}"
    again = pretrained(saved)
    assert type(again) is type(alone)
    assert (logits_of(again, batch(0)) - told[0][name]["trained"]).abs().max() < 1e-5
    for key, values in alone.state_dict().items():
        assert (values - again.state_dict()[key]).abs().max() < 1e-4, key
    assert len(list(saved.glob("*.safetensors"))) > 1
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for tensor in alone.parameters())
    # No file is larger than asked for, but for one that holds a single tensor.
    sizes: dict[str, int] = {}
    for tensor, file in index["weight_map"].items():
        sizes[file] = sizes.get(file, 0) + alone.state_dict()[tensor].numel() * 4
    assert max(sizes.values()) <= 10_000
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["use_cache"] is True
    assert (saved / "generation_config.json").is_file()
    assert not list(folder.glob(".saved*"))


@pytest.mark.parametrize("name", ADAPTED)
def test_only_adapters_train_and_cross(name: str, told: list[dict[str, Any]], folder: Path) -> None:
    from peft import PeftModel

    base = logits_of(pretrained(folder / "llama"), batch(0))
    found = [one["adapters"][name] for one in told]
    first = ADAPTED[name][2][0]  # ranks of the first cell
    assert all(torch.equal(one["first"], base) for one in found)
    before = [found[0]["before"], found[first]["before"]]
    assert len(before[0]) == 2 * 2 * 2
    for key, values in found[0]["after"].items():
        mean = (before[0][key].double() + before[1][key].double()) / 2
        assert (before[0][key] - before[1][key]).abs().max() > 1e-4
        assert all(torch.equal(one["after"][key], values) for one in found)
        assert (values - mean).abs().max() < 1e-6, key
    adapters = sum(values.numel() * values.itemsize for values in before[0].values())
    # Two cells: each sends its adapters to the other, once.
    assert [sum(one["bytes"] for one in found[start:end]) for start, end in ((0, first), (first, 4))] == [
        adapters,
        adapters,
    ]
    loaded = PeftModel.from_pretrained(pretrained(folder / "llama"), folder / f"adapters, {name}")
    assert torch.equal(logits_of(loaded, batch(0)), found[0]["logits"])
    assert (found[0]["logits"] - base).abs().max() > 1e-2
    merged, own = loaded.merge_and_unload().state_dict(), pretrained(folder / f"merged, {name}").state_dict()
    assert merged.keys() == own.keys() and all(torch.equal(merged[key], own[key]) for key in own)
    for one in found:
        assert one["touched"].startswith("ConfigError: cells [1] hold other values of 'model.norm.weight' than cell 0")


def test_weights_are_converted_while_they_are_read(told: list[dict[str, Any]], folder: Path) -> None:
    expected = logits_of(pretrained(folder / "llama", dtype=torch.bfloat16), batch(0))
    for one in told:
        assert one["bfloat16"]["logits"].dtype == torch.bfloat16
        assert torch.equal(one["bfloat16"]["logits"], expected)
        assert one["bfloat16"]["has_gradients"]
        assert all(".lora_" in name for name in one["bfloat16"]["has_gradients"])


def test_random_weights_are_those_of_a_whole_model(told: list[dict[str, Any]]) -> None:
    torch.manual_seed(7)
    whole = dict(models.causal_lm({**SMALL, "tie_word_embeddings": True}).named_parameters())
    for one in told:
        found = one["random"]
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_errors_are_told_to_all_ranks(told: list[dict[str, Any]]) -> None:
    found = [one["wrong"] for one in told]
    assert all(one == found[0] for one in found)
    parts = {
        "broken": (
            "CheckpointError: the weights in",
            "missing: model.norm.weight;",
            "of another shape: model.layers.1.mlp.up_proj.weight (32, 48), in the model (48, 32);",
            "unexpected: model.extra;",
        ),
        "broken on one": ("CheckpointError:", "missing: model.norm.weight", "(rank 2 of 4)"),
        "no folder": ("CheckpointError:", "nowhere holds neither model.safetensors nor"),
        "other base": ("ConfigError: cells [1]", "'model.layers.1.self_attn.k_proj.weight'"),
        "no adapters": ("ConfigError: FSDPLlamaForCausalLM has no adapters",),
        "other folders": ("ConfigError: ranks were given different",),
        "in a file": ("ConfigError:", "config.json is a file"),
        "bad size": ("ConfigError: max_shard_size must be the size of a file, such as '5GB', got 'many'",),
    }
    for name, texts in parts.items():
        assert all(text in found[0][name] for text in texts), found[0][name]
