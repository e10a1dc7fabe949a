"""TRL's trainers with one line more: what they train on, what counts as a token, and what they compare with."""

from __future__ import annotations

import json
import os
from functools import partial
from importlib import import_module
from pathlib import Path
from pydoc_data import topics
from typing import Any

import pytest
import torch.distributed as dist

import xffl
from tests.ranks.test_federate import differ, make_model, run_job, weights_of
from tests.worlds import be_launched, run_world
from xffl.distributed.startup.isolation import enter_isolation

pytest.importorskip("trl")
pytest.importorskip("peft")

SIZES = (2, 2)
ROWS = 2
STEPS = 6
EVERY = 3
SAMPLES = sum(SIZES) * ROWS * STEPS  # an epoch
LENGTH = 48
make_bytes_model = partial(make_model, vocabulary=259)  # 256 bytes, and the three tokens that follow


def make_tokenizer() -> Any:
    """Return a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: index for index, letter in enumerate(letters)} | {"<s>": 256, "</s>": 257, "<pad>": 258}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def read_lines() -> list[str]:
    """Return lines of the Python manual."""
    return [line for line in "\n".join(topics.topics.values()).split("\n") if len(line) > 40][:SAMPLES]


def configure(kind: Any, folder: str, *, is_sharded: bool = False, **given: Any) -> Any:
    from accelerate.state import DistributedType, PartialState

    if is_sharded:
        plan = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        given |= {"fsdp": True, "fsdp_config": {**plan, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    options: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": ROWS,
        "max_steps": STEPS,
        "max_length": LENGTH,
        "learning_rate": 3e-3,
        "logging_steps": EVERY,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    args = kind(output_dir=folder, **{**options, **given})
    if is_sharded:
        # accelerate leaves FSDP out on CPUs without a word; with the type of GPUs it does not.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return args


def make_adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def make_sft(folder: str, cell: int, *, is_adapted: bool = False, **given: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_dict({"text": [line[: 8 + index % 32] for index, line in enumerate(read_lines())]})
    return SFTTrainer(
        model=make_bytes_model(0 if is_adapted else cell),
        args=configure(SFTConfig, folder, **given),
        train_dataset=rows,
        processing_class=make_tokenizer(),
        peft_config=make_adapters() if is_adapted else None,
    )


def make_plain(folder: str, cell: int, **given: Any) -> Any:
    """Return transformers' Trainer, with the dataset that TRL's has prepared."""
    from transformers import Trainer

    prepared = make_sft(folder, cell, remove_unused_columns=False, **given)  # the model takes no seq_lengths
    return Trainer(
        model=make_bytes_model(cell),
        args=prepared.args,
        train_dataset=prepared.train_dataset,
        data_collator=prepared.data_collator,
    )


def make_dpo(
    folder: str, cell: int, *, is_adapted: bool = False, is_own: bool = False, reference: int = 0, **given: Any
) -> Any:
    from datasets import load_dataset
    from trl import DPOConfig, DPOTrainer

    lines = read_lines()[cell::2] if is_own else read_lines()
    pairs = [
        {"prompt": line[:12], "chosen": line[12 : 14 + index % 20], "rejected": line[20 : 22 + index % 8]}
        for index, line in enumerate(lines)
    ]
    args = configure(DPOConfig, folder, **given)
    # What TRL computes before training is found by other ranks in the cache of a dataset that was loaded.
    home = Path(folder, f"pairs_{xffl.adopt().cell}")
    home.mkdir(parents=True, exist_ok=True)
    (home / f"{os.environ['RANK']}.json").write_text("\n".join(map(json.dumps, pairs)))
    dist.barrier()
    rows = load_dataset("json", data_files=str(home / "0.json"), split="train", cache_dir=str(home))
    return DPOTrainer(
        model=make_bytes_model(0 if is_adapted else cell),
        ref_model=None if is_adapted else make_bytes_model(reference),
        args=args,
        train_dataset=rows,
        processing_class=make_tokenizer(),
        peft_config=make_adapters() if is_adapted else None,
    )


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "packed": (make_sft, {"packing": True}),
    "plain": (make_plain, {"packing": True}),
    "sft": (make_sft, {"is_adapted": True, "is_sharded": True}),
    "dpo": (make_dpo, {}),
    "own dpo": (make_dpo, {"is_adapted": True, "is_own": True}),
    "precomputed": (make_dpo, {"is_adapted": True, "is_own": True, "precompute_ref_log_probs": True}),
}


SOME = ("packed", "plain", "own dpo")
"""SFT and DPO, with adapters and without them, split data and data of each cell's own"""
MORE = ("sft", "dpo", "own dpo", "precomputed")


def count_tokens(dataset: Any) -> int:
    """Return the tokens of a dataset that TRL has prepared, which an epoch counts."""
    if "chosen_ids" in dataset.column_names:
        return sum(len(sample["chosen_ids"]) + len(sample["rejected_ids"]) for sample in dataset)
    return sum(len(sample["input_ids"]) - 1 for sample in dataset)


def be_cell(rank: int, world_size: int, port: int, case: str, folder: str) -> dict[str, Any]:
    from xffl.integrations.transformers import federate

    make, options = CASES[case]
    be_launched(rank, world_size, port)
    with enter_isolation(SIZES) as isolated:
        trainer = make(folder, isolated.cell, **options)
        tokens = count_tokens(trainer.train_dataset)
        rounds = federate(trainer, every=EVERY, data="own" if "is_own" in options else "split")
        trainer.train()
    return {
        "weights": weights_of(trainer.model_wrapped),
        "counts": [report.weights for report in rounds.reports],
        "tokens": tokens,
        "log": [{name for name in line if "xffl" in name or "entropy" in name} for line in trainer.state.log_history],
    }


def be_unlike(rank: int, world_size: int, port: int, folder: str) -> str:
    """Be a rank of a script whose cells have made their reference models each by itself."""
    from xffl.integrations.transformers import federate

    be_launched(rank, world_size, port)
    with enter_isolation((1, 1)) as isolated:
        trainer = make_dpo(folder, isolated.cell, reference=isolated.cell)
        federate(trainer, every=EVERY)
        with pytest.raises(xffl.ConfigError if rank == 0 else (xffl.ConfigError, xffl.LaunchError)) as refused:
            trainer.train()
    return str(refused.value)


def import_once() -> None:
    """Import what the ranks would import each by itself."""
    import_module("peft")
    for name in ("sft_trainer", "dpo_trainer"):
        import_module(f"trl.trainer.{name}")


def train_all(
    rank: int, world_size: int, folder: str, names: tuple[str, ...]
) -> tuple[dict[str, list[Any]], list[str]]:
    os.environ["HF_HUB_OFFLINE"] = "1"  # TRL asks for a template of its own for cards of models
    import_once()
    ranks = {case: run_job(sum(SIZES), be_cell, case, f"{folder}/{case}") for case in names}
    return ranks, run_job(2, be_unlike, f"{folder}/unlike")


@pytest.mark.parametrize("cases", [SOME, pytest.param(MORE, marks=pytest.mark.long)], ids=["some", "more"])
def test_trainers_of_trl_train_cells(tmp_path: Path, cases: tuple[str, ...]) -> None:
    [(ranks, refusals)] = run_world(1, train_all, str(tmp_path), cases, init=False, timeout_s=280)
    for case, trained in ranks.items():
        for rank in trained:
            assert differ(rank["weights"], trained[0]["weights"]) == 0.0, case
            assert rank["counts"] == trained[0]["counts"]
            if "packing" not in CASES[case][1]:
                datasets = trained[:: SIZES[0]] if "is_own" in CASES[case][1] else trained[:1]
                assert sum(map(sum, rank["counts"])) == sum(each["tokens"] for each in datasets), case
            if case != "plain":  # the means of TRL's metrics stay in the lines of losses
                names = {"xffl/round", "xffl/cells", "xffl/bytes", "xffl/seconds"}
                assert [line for line in rank["log"] if line] == [names, {"entropy"}] * 2, case
    if cases == SOME:
        assert differ(ranks["packed"][0]["weights"], ranks["plain"][0]["weights"]) < 1e-6
        assert ranks["packed"][0]["counts"] == ranks["plain"][0]["counts"]
    else:
        assert differ(ranks["own dpo"][0]["weights"], ranks["precomputed"][0]["weights"]) < 1e-6
    assert "reference parameters differ between the cells" in refusals[0]
