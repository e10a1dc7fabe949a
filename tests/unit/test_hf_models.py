"""Hugging Face models in one process: sources, files, losses and adapters against transformers and peft themselves."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from xffl.distributed.distributed_state import DistributedState
from xffl.errors import CheckpointError, ConfigError
from xffl.extras import install_command
from xffl.parallel.meta_weights import materialize
from xffl.training import models
from xffl.training.models.weights import local_indices

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")
safetensors_root = pytest.importorskip("safetensors")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
LLAMA: dict[str, Any] = {"model_type": "llama", **SIZES}
TIED: dict[str, Any] = {**LLAMA, "tie_word_embeddings": True}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "resid_pdrop": 0.0,
}
OTHERS: dict[str, dict[str, Any]] = {
    "tied": TIED,
    "qwen2": {"model_type": "qwen2", **SIZES},
    "gemma2": {"model_type": "gemma2", **SIZES, "head_dim": 8},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 4},
    "llama3 rope": {
        **LLAMA,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}
TOKENS = torch.arange(20).reshape(2, 10) * 7 % 64


def alone() -> DistributedState:
    """The state of a process that has no group."""
    state = DistributedState()
    state.set_global("gloo", "cpu", None, None, 0, 1)
    state.set_node(0, 1, 0, 1)
    return state


def logits_of(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS).logits
    return found


def native(source: dict[str, Any]) -> Any:
    """A model that transformers builds and initializes by itself."""
    given = dict(source)
    config = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    return transformers.AutoModelForCausalLM.from_config(config)


def saved(model: Any, folder: Path, **arguments: Any) -> Path:
    model.save_pretrained(folder, **arguments)
    return folder


@pytest.mark.parametrize("source", [LLAMA, GPT2, *OTHERS.values()], ids=["llama", "gpt2", *OTHERS])
def test_a_folder_gives_the_model_that_was_saved(source: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = native(source)
    saved(model, tmp_path, save_original_format=False, max_shard_size="20KB")
    found: Any = models.causal_lm(tmp_path)
    assert type(found) is type(model) and found.training
    assert torch.equal(logits_of(found), logits_of(model))
    assert {name: (t.dtype, t.requires_grad) for name, t in found.named_parameters()} == {
        name: (t.dtype, t.requires_grad) for name, t in model.named_parameters()
    }
    # A model on the meta device, read as the whole one is.
    bare = models.causal_lm(tmp_path, weights=False)
    assert all(tensor.is_meta for tensor in (*bare.parameters(), *bare.buffers()))
    materialize(bare, torch.device("cpu"), models.ModuleInitializer(bare, only_buffers=True))
    models.load_weights(bare, tmp_path, alone())
    assert torch.equal(logits_of(bare), logits_of(model))
    models.save_pretrained(bare, tmp_path / "again", alone(), max_shard_size="20KB")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", local_files_only=True)
    assert torch.equal(logits_of(again), logits_of(model))


@pytest.mark.parametrize("source", [LLAMA, *OTHERS.values()], ids=["llama", *OTHERS])
def test_random_weights_part_by_part_are_those_of_a_whole_model(source: dict[str, Any]) -> None:
    torch.manual_seed(3)
    whole = models.causal_lm(source)
    bare = models.causal_lm(source, weights=False)
    torch.manual_seed(3)
    materialize(bare, torch.device("cpu"), models.ModuleInitializer(bare))
    for (name, one), (other, two) in zip(
        (*whole.named_parameters(), *whole.named_buffers()),
        (*bare.named_parameters(), *bare.named_buffers()),
        strict=True,
    ):
        assert name == other and torch.equal(one, two), name
    # Other numbers than transformers draws, of the same kind.
    ours, theirs = dict(whole.named_parameters()), dict(native(source).named_parameters())
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        if values.numel() > 500:
            assert ours[name].std().item() == pytest.approx(values.std().item(), rel=0.2), name
        elif values.std() == 0:
            assert torch.equal(ours[name], values), name


def test_modules_that_initialize_others_are_refused() -> None:
    bare = models.causal_lm(GPT2, weights=False)
    with pytest.raises(ConfigError, match=r"GPT2Attention \(transformer\.h\.0\.attn\) initializes the tensors of its"):
        models.ModuleInitializer(bare)
    whole, theirs = models.causal_lm({**GPT2, "n_embd": 128}), native({**GPT2, "n_embd": 128})
    name = "transformer.h.1.mlp.c_proj.weight"  # scaled by the depth
    assert whole.get_parameter(name).std().item() == pytest.approx(theirs.get_parameter(name).std().item(), rel=0.05)
    with pytest.raises(ConfigError, match="does not belong to the model"):
        models.ModuleInitializer(models.causal_lm(LLAMA, weights=False))(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="model must be a model of transformers, got a Linear"):
        models.ModuleInitializer(nn.Linear(2, 2))


def test_sources_of_a_configuration(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES)
    before = config.to_dict()
    config.save_pretrained(tmp_path)
    found = []
    for source in (config, LLAMA, tmp_path / "config.json", str(tmp_path / "config.json")):
        torch.manual_seed(0)
        found.append(models.causal_lm(source).state_dict())
    assert config.to_dict() == before
    assert all(torch.equal(one[name], found[0][name]) for one in found for name in found[0])
    half = models.causal_lm(config, dtype="bfloat16")
    assert {tensor.dtype for tensor in half.parameters()} == {torch.bfloat16}
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32  # type: ignore[union-attr]
    assert {tensor.dtype for tensor in models.causal_lm({**LLAMA, "dtype": "float16"}).parameters()} == {torch.float16}


@pytest.mark.parametrize(
    "source, arguments, told",
    [
        ("meta-llama/Llama-3.1-8B", {}, "neither a configuration's file nor a folder.*nothing is downloaded"),
        ("empty", {}, "empty holds no safetensors files; give .*config.json"),
        ({"model_type": "lama"}, {}, "model_type 'lama' is unknown to transformers"),
        ({}, {}, "model_type None"),
        (7, {}, "source must be .* got 7"),
        ({"model_type": "t5"}, {}, "configuration 't5' is not of a causal language model"),
        (LLAMA, {"dtype": "int8"}, "dtype must be a floating-point type of torch, .* got 'int8'"),
        (LLAMA, {"dtype": "float"}, None),
        (LLAMA, {"dtype": "half precision"}, "dtype must be .* got 'half precision'"),
        ("torn", {}, "configuration of .*torn cannot be read"),
        ("generates", {}, "generation_config.json cannot be read"),
    ],
)
def test_wrong_sources(
    source: Any, arguments: dict[str, Any], told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    transformers.LlamaConfig(**SIZES).save_pretrained("empty")
    transformers.LlamaConfig(**SIZES).save_pretrained("generates")
    for name in ("generation_config.json", "model.safetensors"):
        Path("generates", name).write_text("{")
    Path("torn").mkdir()
    Path("torn/config.json").write_text("{")
    if told is None:
        models.causal_lm(source, **arguments)
        return
    with pytest.raises(ConfigError, match=told):
        models.causal_lm(source, **arguments)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.causal_lm(LLAMA)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=f"need peft, .*{re.escape(install_command('lora'))}"):
        models.add_lora(model)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("hf"))):
        models.causal_lm(LLAMA)


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change tensors of a folder's only file."""
    path = folder / "model.safetensors"
    tensors = safetensors.load_file(path)
    for name, values in changes.items():
        tensors.pop(name, None)
        if values is not None:
            tensors[name] = values
    safetensors.save_file(tensors, path)


def test_files_that_do_not_fit_are_told_by_name(tmp_path: Path) -> None:
    model = models.causal_lm(LLAMA)
    before = {name: values.clone() for name, values in model.state_dict().items()}
    saved(native(LLAMA), tmp_path)
    norm = "model.norm.weight"
    for changes, told in (
        ({norm: None}, "missing: model.norm.weight;"),
        ({norm: torch.ones(31)}, r"another shape: model.norm.weight \(31,\), in the model \(32,\)"),
        ({norm: torch.ones(32, dtype=torch.int32)}, "another kind: model.norm.weight torch.int32"),
        ({norm: torch.ones(32), "model.more": torch.ones(2)}, "unexpected: model.more;"),
    ):
        edit(tmp_path, **changes)
        with pytest.raises(CheckpointError, match=told):
            models.load_weights(model, tmp_path, alone())
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
    # What older files hold beside the weights is calculated today.
    edit(tmp_path, **{"model.more": None, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    models.load_weights(model, tmp_path, alone())
    (tmp_path / "model.safetensors").write_bytes(b"no tensors at all")
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read"):
        models.load_weights(model, tmp_path, alone())


def test_weights_that_are_replaced_while_they_are_read_are_of_one_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace the folder before each opening of a file of it in turn; it has two files of weights."""
    model, found = models.causal_lm(LLAMA), []
    for moment in range(20):
        path, replaced, count, begin = tmp_path / str(moment) / "of_1", list[int](), [0], safetensors_root.safe_open
        for value in (1.0, 2.0):
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    tensor.fill_(value)
            models.save_pretrained(model, path.with_name(f"of_{value:g}"), alone(), max_shard_size=20_000)
        assert len(list(path.glob("*.safetensors"))) > 1

        def opened(
            *args: Any,
            begin: Any = begin,
            count: list[int] = count,
            moment: int = moment,
            path: Path = path,
            replaced: list[int] = replaced,
            **kwargs: Any,
        ) -> Any:
            if count[0] == moment:
                path.rename(path.with_name("before"))
                path.with_name("of_2").rename(path)
                replaced.append(1)
                if moment % 2:
                    shutil.rmtree(path.with_name("before"))
            count[0] += 1
            return begin(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(safetensors_root, "safe_open", opened)
            models.load_weights(model, path, alone())
        values = {float(x) for tensor in model.state_dict().values() for x in tensor.flatten().unique()}
        assert len(values) == 1, moment
        found += values
        if not replaced:
            break
    assert found[-1] == 1.0 and set(found[:-1]) == {2.0} and len(found) > 4


def test_tied_weights_may_have_either_name(tmp_path: Path) -> None:
    model = native(TIED)
    expected = logits_of(model)
    saved(model, tmp_path)
    embedding = model.get_parameter("model.embed_tokens.weight").detach().clone()
    edit(tmp_path, **{"model.embed_tokens.weight": None, "lm_head.weight": embedding})
    found = models.causal_lm(tmp_path)
    assert found.lm_head.weight is found.model.embed_tokens.weight  # type: ignore[union-attr]
    assert torch.equal(logits_of(found), expected)
    edit(tmp_path, **{"model.embed_tokens.weight": embedding})
    assert torch.equal(logits_of(models.causal_lm(tmp_path)), expected)
    edit(tmp_path, **{"model.embed_tokens.weight": embedding + 1})
    with pytest.raises(
        CheckpointError, match=r"are one tied tensor of the model but differ.*tie_word_embeddings=False"
    ):
        models.causal_lm(tmp_path)


def test_an_index_is_not_trusted(tmp_path: Path) -> None:
    saved(native(LLAMA), tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    good = json.loads(path.read_text())
    for name, file, told in (
        ("model.norm.weight", "../model.safetensors", "'model.norm.weight' lies outside the folder"),
        ("model.norm.weight", "elsewhere.safetensors", "elsewhere.safetensors cannot be read"),
        ("model.more", good["weight_map"]["model.norm.weight"], "lacks 'model.more'"),
        ("model.norm.weight", 3, "index.json must be a text.*, got 3; copy the model's files again"),
    ):
        path.write_text(json.dumps({"weight_map": {**good["weight_map"], name: file}}))
        with pytest.raises(CheckpointError, match=told):
            models.causal_lm(tmp_path)
    for text, told in (
        ("[]", "index.json must be a mapping of names to values"),
        ('{"weight_map": {}}', "missing: model.embed_tokens.weight,"),
    ):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=told):
            models.causal_lm(tmp_path)


def test_the_loss_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    model: Any = models.causal_lm(LLAMA)
    labels = TOKENS.clone()
    labels[0, 3:] = -100
    labels[1, 0] = -100
    output = model(input_ids=TOKENS, labels=labels)
    loss = models.causal_lm_loss(output, labels)
    assert loss.item() == pytest.approx(output.loss.item(), abs=1e-6)
    assert models.causal_lm_loss(output.logits.bfloat16(), labels).dtype == torch.float32
    following = torch.cat((labels[:, 1:], torch.full((2, 1), -100)), dim=1)
    assert models.causal_lm_loss(output, following, is_shifted=True).item() == pytest.approx(loss.item(), abs=1e-6)
    # Two sequences apart, weighted by what they count, are both together.
    counts = [models.count_targets(labels[row : row + 1]) for row in (0, 1)]
    parts = [models.causal_lm_loss(output.logits[row : row + 1], labels[row : row + 1]) for row in (0, 1)]
    assert counts == [2, 9] and models.count_targets(following, is_shifted=True) == 11
    mean = sum(count * part.item() for count, part in zip(counts, parts, strict=True)) / 11
    assert mean == pytest.approx(loss.item(), abs=1e-6)
    nothing = models.causal_lm_loss(model(input_ids=TOKENS), torch.full_like(TOKENS, -100))
    nothing.backward()
    assert nothing.item() == 0 and all(not tensor.grad.any() for tensor in model.parameters())


def test_layers_to_wrap() -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    bare = models.causal_lm(LLAMA, weights=False)
    assert models.layer_classes(bare) == (LlamaDecoderLayer,)
    assert models.layer_classes(models.add_lora(bare)) == (LlamaDecoderLayer,)
    plain = nn.Sequential(nn.ModuleList([nn.LSTM(2, 2), nn.LSTM(2, 2)]), nn.ModuleList([nn.Linear(2, 2)]))
    assert models.layer_classes(plain) == (nn.LSTM,)
    with pytest.raises(ConfigError, match="Linear repeats no layers"):
        models.layer_classes(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "source, targets", [(LLAMA, None), (LLAMA, "all-linear"), (GPT2, ["c_attn", "c_proj"])], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_those_of_peft(source: dict[str, Any], targets: Any, dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = saved(models.causal_lm(source, dtype=dtype), tmp_path / "base")
    model: Any = models.add_lora(models.causal_lm(base), rank=3, alpha=5, target_modules=targets, use_rslora=True)
    assert torch.equal(logits_of(model), logits_of(models.causal_lm(base)))
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    assert sum(tensor.numel() for tensor in trained) == model.get_nb_trainable_parameters()[0]
    with torch.no_grad():
        for tensor in trained:
            tensor.normal_(std=0.3)
    expected = logits_of(model)
    state = models.adapter_state(model)
    theirs = peft.get_peft_model_state_dict(model)
    assert state.keys() == theirs.keys() and all(torch.equal(state[name], theirs[name]) for name in theirs)
    assert not {values.data_ptr() for values in state.values()} & {values.data_ptr() for values in trained}
    models.save_adapters(model, tmp_path / "adapters", alone())
    models.save_pretrained(model, tmp_path / "merged", alone())
    loaded = peft.PeftModel.from_pretrained(models.causal_lm(base), tmp_path / "adapters")
    assert torch.equal(logits_of(loaded), expected)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", local_files_only=True)
    ours, own = merged.state_dict(), loaded.merge_and_unload().state_dict()
    assert ours.keys() == own.keys() and all(torch.equal(ours[name], own[name]) for name in own)
    # The model is left as it was.
    assert torch.equal(logits_of(model), expected)


def test_wrong_adapters(tmp_path: Path) -> None:
    model = models.causal_lm(LLAMA)
    for arguments, told in (
        ({"rank": 0}, "rank of adapters must be a positive integer, got 0"),
        ({"rank": 2.5}, "rank of adapters must be a positive integer, got 2.5"),
        ({"dropout": 1.0}, "dropout of adapters must be a number >= 0 and < 1, got 1.0"),
        ({"target_modules": ["w_proj"]}, "'w_proj'"),
        ({"target_modules": ["embed_tokens"]}, "peft also trains"),
    ):
        with pytest.raises(ConfigError, match=told):
            models.add_lora(models.causal_lm(LLAMA, weights=False), **arguments)
    with pytest.raises(ConfigError, match="without adapters, got a PeftModelForCausalLM"):
        models.add_lora(models.add_lora(model))
    with pytest.raises(ConfigError, match="model must be a model of transformers, got a Linear"):
        models.save_pretrained(nn.Linear(2, 2), tmp_path / "never", alone())
    tied = models.add_lora(models.causal_lm(TIED), target_modules=["lm_head"])
    with pytest.raises(ConfigError, match=r"model.embed_tokens.weight, lm_head.weight are one tied tensor"):
        models.save_pretrained(tied, tmp_path / "never", alone())
    of_peft = peft.get_peft_model(models.causal_lm(LLAMA), peft.LoraConfig(use_dora=True, task_type="CAUSAL_LM"))
    with pytest.raises(ConfigError, match="lora_magnitude_vector.* is not an adapter of add_lora"):
        models.save_pretrained(of_peft, tmp_path / "never", alone())
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no adapters"):
        models.adapter_state(models.causal_lm(LLAMA))


def test_a_folder_is_replaced_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    models.save_pretrained(models.causal_lm(LLAMA), folder, alone(), max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    again = models.causal_lm(LLAMA)
    models.save_pretrained(again, folder, alone())
    # Nothing of the other one is left.
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert torch.equal(logits_of(models.causal_lm(folder)), logits_of(again))


def test_what_is_not_written_here_is_not_lost(tmp_path: Path) -> None:
    model = models.add_lora(models.causal_lm(LLAMA))
    base = saved(models.causal_lm(LLAMA), tmp_path / "base")
    with pytest.raises(ConfigError, match=r"base holds 'config.json', which is not written here"):
        models.save_adapters(model, base, alone())
    (base / "tokenizer.json").write_text("{}")
    for folder in (base, tmp_path):
        with pytest.raises(ConfigError, match=r"holds '(tokenizer.json|base)', which is not written here"):
            models.save_pretrained(model, folder, alone())
    archived, adapters = tmp_path / "archived", tmp_path / "adapters"
    models.save_adapters(model, archived, alone())
    adapters.symlink_to(archived)
    models.save_adapters(model, adapters, alone())
    assert not adapters.is_symlink() and sorted(path.name for path in tmp_path.iterdir()) == [
        "adapters",
        "archived",
        "base",
    ]


def test_no_code_of_a_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"AutoConfig": "code.Odd", "AutoModelForCausalLM": "code.Odd"}
    for kind in ("odd", "llama"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "auto_map": kinds, **SIZES}))
        (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        monkeypatch.setattr("builtins.input", lambda *_: "y")  # to a question that transformers would ask
        if kind == "llama":
            assert models.layer_classes(models.causal_lm(tmp_path, weights=False))[0].__name__ == "LlamaDecoderLayer"
        else:
            with pytest.raises(ConfigError, match="cannot be read"):
                models.causal_lm(tmp_path, weights=False)
    assert not (tmp_path / "ran").exists()


def test_a_plain_tensor_is_held_whole() -> None:
    assert [places.tolist() for places in local_indices(torch.zeros(2, 3))] == [[0, 1], [0, 1, 2]]
    assert local_indices(torch.zeros(())) == ()


PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.rst"


def run_page(folder: Path) -> tuple[list[float], list[str]]:
    """Run the blocks of the page: the script, with adapters or without, and how adapters are written."""
    blocks = re.findall(r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", PAGE.read_text(), re.MULTILINE)
    script, _, adapted, written = map(textwrap.dedent, blocks)
    changed = []
    for text in (script, script.replace("bare = models", adapted + "#", 1)):
        kept: dict[str, Any] = {
            "folder": folder / "base",
            "config": {"distributed": {"strategy": "fsdp"}, "training": {"gradient_accumulation": 1}},
            "loader": [TOKENS, TOKENS],
        }
        for name in ("trained", "adapters", "merged"):
            text, written = (part.replace(f'"{name}"', f'folder.parent / "{name}"') for part in (text, written))
        if "add_lora" in text:
            text += textwrap.indent(written, "    ")
        exec(text, kept)
        read = [models.causal_lm(folder / name).state_dict() for name in ("base", "trained")]
        changed.append(sum(not torch.equal(read[0][name], read[1][name]) for name in read[0]))
    return changed, sorted(path.name for path in folder.iterdir())


def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    base = models.causal_lm(LLAMA)
    saved(base, tmp_path / "base")
    changed, folders = run_page(tmp_path)
    # All of the model is trained, then what adapters of two layers change.
    assert changed == [len(base.state_dict()), 4]
    assert folders == ["adapters", "base", "merged", "trained"]
