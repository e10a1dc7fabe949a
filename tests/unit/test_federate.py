"""What federate refuses, counts and deals out, and which checkpoints it goes on from; without a Trainer."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xffl.distributed.several_worlds.cell_notes import LoneNotes
from xffl.errors import ConfigError
from xffl.integrations.checkpoints import CellCheckpoints, trained_names
from xffl.integrations.dealing import deal_out, is_dealt_out
from xffl.integrations.transformers.refusals import check_arguments, check_loader
from xffl.integrations.transformers.trainer_files import TrainerFiles
from xffl.integrations.transformers.zero import check_engine
from xffl.integrations.weights import SHIFTING_LOSSES, find_count, label_names, shifts_labels

PLAIN = {
    "load_best_model_at_end": False,
    "auto_find_batch_size": False,
    "push_to_hub": False,
    "save_strategy": "steps",
    "n_gpu": 1,
}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"load_best_model_at_end": True}, "load_best_model_at_end=True: .*its own best checkpoint"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True: .*per_device_train_batch_size"),
        ({"push_to_hub": True}, "push_to_hub=True"),
        ({"save_strategy": "best"}, "save_strategy='best'"),
        ({"sync_ref_model": True}, "sync_ref_model=True: .*reference model"),
        ({"n_gpu": 2}, "one process for each GPU"),
    ],
)
def test_arguments_under_which_cells_would_part_are_refused_by_name(given: dict[str, Any], told: str) -> None:
    check_arguments(SimpleNamespace(args=SimpleNamespace(**PLAIN)))
    with pytest.raises(ConfigError, match=told):
        check_arguments(SimpleNamespace(args=SimpleNamespace(**{**PLAIN, **given})))


class Inherited:
    train_dataset = ()

    def get_train_dataloader(self) -> Any:
        return self.train_dataset


class Extended(Inherited):
    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


class Replaced(Inherited):
    def get_train_dataloader(self) -> Any:
        return [1, 2]


def test_a_loader_of_other_data_cannot_be_split() -> None:
    check_loader(Inherited())
    check_loader(Extended())
    with pytest.raises(ConfigError, match="get_train_dataloader of Replaced does not read.*give data='own'"):
        check_loader(Replaced())


@pytest.mark.parametrize(
    ("zero", "told"),
    [
        ({"stage": 0}, "stages 1 to 3, but the stage is 0; write 'zero_optimization'"),
        ({"stage": 2, "round_robin_gradients": True}, "round_robin_gradients"),
    ],
)
def test_engines_whose_masters_are_elsewhere_are_refused(zero: dict[str, Any], told: str) -> None:
    def trainer_with(zero: dict[str, Any]) -> Any:
        plugin = SimpleNamespace(zero_stage=zero["stage"], deepspeed_config={"zero_optimization": zero})
        accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
        return SimpleNamespace(is_deepspeed_enabled=True, accelerator=accelerator)

    check_engine(trainer_with({"stage": 1}))
    with pytest.raises(ConfigError, match=told):
        check_engine(trainer_with(zero))


def test_weights_count_what_a_round_has_not_taken() -> None:
    batch = {"input_ids": torch.zeros(3, 4), "labels": torch.tensor([[5, 1, -100, 2], [5, 1, 1, 1], [-100] * 4])}
    tokens = find_count("tokens", 0, is_shifted=True)
    samples, fixed, silent = (find_count(*given) for given in [("samples", 0), (2, 0), (2, 1)])
    counts = (tokens, samples, fixed, silent)
    for count in counts:
        count.add(batch)
        count.add(batch)
    assert [count.counted() for count in counts] == [10.0, 6.0, 2.0, 0.0]
    for count in counts:
        count.restart(1.0)
        count.add({"labels": torch.zeros(2, dtype=torch.int64)})  # those of a classifier are not shifted
    assert [count.counted() for count in counts] == [3.0, 3.0, 2.0, 0.0]
    with pytest.raises(ConfigError, match="weight='samples'"):
        tokens.add({"input_ids": torch.zeros(3, 4)})
    with pytest.raises(ConfigError, match="give 'tokens', 'samples', or a number"):
        find_count("words", 0)


def test_packed_rows_and_pairs_count() -> None:
    tokens, samples = find_count("tokens", 0, is_shifted=True), find_count("samples", 0)
    packed = {"input_ids": torch.zeros(1, 5), "labels": torch.tensor([[-100, 1, 1, -100, 1]])}
    pairs = {"input_ids": torch.zeros(2, 4), "completion_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0]])}
    for count in (tokens, samples):
        count.add({**packed, "cu_seq_lens_q": torch.tensor([0, 3, 5])})
        count.add(pairs)
    assert (tokens.counted(), samples.counted()) == (3 + 3, 2 + 2)
    prompts: Any = [{"prompt": "?"}]
    with pytest.raises(ConfigError, match="weight='samples'"):
        tokens.add(prompts)
    with pytest.raises(ConfigError, match="give a number"):
        samples.add(prompts)


def test_the_one_label_of_a_row_counts() -> None:
    tokens = find_count("tokens", 0, is_shifted=True)
    tokens.add({"labels": torch.zeros(4, 1)})
    assert tokens.counted() == 4


def test_the_first_label_counts_where_the_model_does_not_shift_them() -> None:
    tokens = find_count("tokens", 0, is_shifted=False)
    tokens.add({"labels": torch.tensor([[5, 1, -100, 2], [-100, 1, 1, 1]])})
    assert tokens.counted() == 6


@pytest.mark.parametrize("labels", [[{"boxes": torch.zeros(1, 4)}], [torch.zeros(3), torch.zeros(2)]])
def test_labels_in_a_list_are_refused_by_name(labels: list[Any]) -> None:
    with pytest.raises(ConfigError, match="labels in a tensor, but a batch has a list of them; give weight='samples'"):
        find_count("tokens", 0).add({"labels": labels})


def test_models_that_shift_their_labels_are_known() -> None:
    transformers = pytest.importorskip("transformers")
    losses = pytest.importorskip("transformers.loss.loss_utils")
    shifting = {name for name, loss in losses.LOSS_MAPPING.items() if loss is losses.ForCausalLMLoss}
    assert shifting <= SHIFTING_LOSSES
    small = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}
    llama = transformers.LlamaConfig(**small, num_attention_heads=1)
    bert = transformers.BertConfig(**small, num_attention_heads=1)
    t5 = transformers.T5Config(vocab_size=8, d_model=4, d_kv=4, d_ff=4, num_layers=1, num_heads=1)
    gpt2 = transformers.GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1)
    image = transformers.ImageGPTConfig(vocab_size=8, n_embd=4, n_layer=1, n_head=1)
    decoder = transformers.GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1, add_cross_attention=True)
    with torch.device("meta"):
        causal = (
            transformers.LlamaForCausalLM(llama),
            transformers.GPT2LMHeadModel(gpt2),
            transformers.GPT2DoubleHeadsModel(gpt2),
            transformers.ImageGPTForCausalImageModeling(image),
        )
        others = (
            transformers.T5ForConditionalGeneration(t5),
            transformers.EncoderDecoderModel(
                encoder=transformers.BertModel(bert), decoder=transformers.GPT2LMHeadModel(decoder)
            ),
            transformers.BertForMaskedLM(bert),
            transformers.BertForTokenClassification(bert),
            torch.nn.Linear(1, 1),
        )
    assert [shifts_labels(torch.nn.Sequential(model)) for model in causal] == [True] * len(causal)
    assert [shifts_labels(model) for model in others] == [False] * len(others)


def test_labels_of_several_losses_are_refused_by_name() -> None:
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1)
    model = transformers.GPT2DoubleHeadsModel(gpt2)
    batch = {"input_ids": torch.ones(2, 3, 5, dtype=torch.int64), "labels": torch.ones(2, 3, 5, dtype=torch.int64)}
    several = {**batch, "mc_labels": torch.zeros(2, dtype=torch.int64)}
    count = find_count("tokens", 0, is_shifted=shifts_labels(model), names=label_names(torch.nn.Sequential(model)))
    count.add(batch)
    assert count.counted() == 2 * 3 * 4
    with pytest.raises(ConfigError, match="labels of one loss, but a batch has labels and mc_labels.*weight='samples'"):
        count.add(several)
    samples = find_count("samples", 0)
    samples.add(several)
    assert samples.counted() == 2


def test_what_is_made_of_a_part_is_of_the_same_cell() -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"number": list(range(20))})
    part = deal_out(whole, cell=0, cells=2, seed=0)
    made = {
        "map": part.map(lambda row: {"double": 2 * row["number"]}),
        "filter": part.filter(lambda row: row["number"] % 2 == 0),
        "select": part.select([3, 1]),
        "shuffle": part.shuffle(seed=0),
        "split": part.train_test_split(test_size=2)["train"],
        "format": part.with_format("torch"),
        "several": part.rename_column("number", "value").map(lambda row: row, num_proc=2).sort("value").skip(2),
        "subset": torch.utils.data.Subset(part, [0]),
        "again": deal_out(part.shuffle(seed=1), cell=0, cells=2, seed=0),
    }
    assert [name for name, dataset in made.items() if not is_dealt_out(dataset)] == []
    assert len(made["again"]) == len(part) == 10
    other = whole.map(lambda row: row)
    mixed = datasets.concatenate_datasets([part, other]), datasets.concatenate_datasets([other, part])
    assert [is_dealt_out(dataset) for dataset in (whole, other, *mixed)] == [False] * 4
    assert is_dealt_out(datasets.concatenate_datasets([part, part.shuffle(seed=2)]))


def test_cells_have_parts_of_equal_length_and_streams_are_refused() -> None:
    parts = [deal_out(range(11), cell=cell, cells=3, seed=4) for cell in range(3)]
    dealt = [sample for part in parts for sample in part]
    assert [len(part) for part in parts] == [3, 3, 3]
    assert len(set(dealt)) == 9
    with pytest.raises(ConfigError, match="data='own'"):
        deal_out(iter(range(11)), cell=0, cells=3, seed=4)


STATE: Any = SimpleNamespace(cell=0, cells=2, cell_rank=0, cell_size=1, is_first_of_job=True)
"""All that checkpoints ask of a state."""


class OtherCell(LoneNotes):
    """Notes of a cell beside another one that has told its own."""

    def __init__(self, told: str) -> None:
        super().__init__()
        self._told = told

    def gather(self, name: str) -> tuple[str, ...]:
        is_told = name == "checkpoints at the start"
        return (*super().gather(name), self._told if is_told else super().gather(name)[0])

    def read(self, name: str) -> tuple[str | None, ...]:
        return (*super().read(name), self._told)


def saved(folder: Path, told: str, kept: int | None = None) -> CellCheckpoints:
    """Save checkpoints of the steps 2, 4 and 6, which have 0, 1 and 1 rounds behind them."""
    checkpoints = CellCheckpoints(TrainerFiles(folder, kept), STATE, OtherCell(told))
    for step, meetings in ((2, 0), (4, 1), (6, 1)):
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir()
        checkpoints.save(checkpoint, step, meetings, {"step": step})
    return checkpoints


@pytest.mark.parametrize(("told", "step"), [("0 1 2", 6), ("0", 2), ("", None), ("1", 6)])
def test_the_newest_checkpoint_after_as_many_rounds_as_the_others_is_used(
    told: str, step: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = saved(tmp_path, told)
    (tmp_path / "checkpoint-8").mkdir()  # a kill has left it
    resumed = checkpoints.agree("", starts_over=False)
    assert (None if resumed is None else resumed.step) == step
    said = capsys.readouterr().err
    assert ("there is no checkpoint of cell 1, so all 2 cells begin anew" in said) == (not told)
    if resumed is not None:
        together = f"all 2 cells after as many rounds ({resumed.meetings})"
        assert said == f"xffl: cell 0 continues from {resumed.folder}, and {together}\n"
        assert checkpoints.load(resumed) == {"step": step}
    # What is newer is written again, and is not whole until then.
    again = CellCheckpoints(TrainerFiles(tmp_path, None), STATE, OtherCell("0 1")).agree("", starts_over=False)
    assert again == resumed


def test_checkpoints_of_which_none_go_together_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none that go together .cell 0 after rounds 0 1 1, cell 1 after rounds 7"):
        saved(tmp_path, "7").agree("", starts_over=False)
    assert saved_steps(tmp_path) == [2, 4, 6]
    assert CellCheckpoints(TrainerFiles(tmp_path, None), STATE, OtherCell("7")).agree("", starts_over=True) is None


def test_a_checkpoint_of_another_model_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    model: Any = torch.nn.Linear(2, 2)
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()

    def agree(*, starts_over: bool = False) -> Any:
        files = TrainerFiles(tmp_path, None)
        return CellCheckpoints(files, STATE, LoneNotes(), trained_names(model)).agree("", starts_over=starts_over)

    CellCheckpoints(TrainerFiles(tmp_path, None), STATE, LoneNotes(), trained_names(model)).save(folder, 2, 0, {})
    assert agree().folder == folder
    model = torch.compile(model)  # as torch_compile=True does, which may be left out the next time
    assert agree().folder == folder
    model.bias.requires_grad_(False)
    told = "checkpoint-2 was saved while 2 parameters .* this model trains 1; give another folder .* or call train"
    with pytest.raises(ConfigError, match=told):
        agree()
    assert agree(starts_over=True) is None


def test_the_others_hear_that_newer_checkpoints_do_not_count_any_more(tmp_path: Path) -> None:
    saved(tmp_path, "0")
    notes = OtherCell("0")
    CellCheckpoints(TrainerFiles(tmp_path, None), STATE, notes).agree("", starts_over=False)
    assert notes.read("checkpoints") == ("0", "0")


def test_a_checkpoint_that_a_slower_cell_needs_is_kept(tmp_path: Path) -> None:
    for name in ("even", "slow"):
        (tmp_path / name / "checkpoint-1").mkdir(parents=True)  # a kill has left it
    saved(tmp_path / "even", "0 1", kept=1)
    saved(tmp_path / "slow", "0", kept=1)
    assert saved_steps(tmp_path / "even") == [4, 6]
    assert saved_steps(tmp_path / "slow") == [1, 2, 4, 6]


def remove_until_death(folder: Path, event: int) -> None:
    """Save with one checkpoint to keep, in a process that dies before it renames or deletes for so many times."""
    passed = itertools.count(1)

    def hear(name: str, given: tuple[Any, ...]) -> None:
        if name in ("os.rename", "os.remove", "os.rmdir") and next(passed) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    saved(folder, "0 1")
    notes = OtherCell("0 1")
    notes.write("checkpoints", "0 1 1")
    sys.addaudithook(hear)
    CellCheckpoints(TrainerFiles(folder, 1), STATE, notes).remove_surplus()


def test_a_removal_that_was_killed_is_finished_at_the_next_start(tmp_path: Path) -> None:
    statuses = []
    while not statuses or statuses[-1]:
        folder = tmp_path / str(len(statuses))
        folder.mkdir()
        process = os.fork()
        if process == 0:
            remove_until_death(folder, len(statuses) + 1)
            os._exit(0)
        statuses.append(os.waitpid(process, 0)[1])
        resumed = CellCheckpoints(TrainerFiles(folder, 1), STATE, OtherCell("1")).agree("", starts_over=False)
        assert resumed is not None and resumed.step == 6
        assert saved_steps(folder) in ([2, 4, 6], [4, 6])
        assert all(path.name.startswith("checkpoint-") for path in folder.iterdir())
    assert len(statuses) > 3  # deaths: before it was renamed, before each file, before the folder


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.iterdir())
