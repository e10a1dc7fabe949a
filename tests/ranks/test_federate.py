"""One line in a Trainer's script: what it trains, killed and started again, too, is what a loop by hand trains."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from pydoc_data import topics
from typing import Any, Literal, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, SequentialSampler, Subset

import xffl
from tests.connections import sent_by_ports
from tests.ports import free_port
from tests.processes import await_cells
from tests.ranks.test_elastic_trainer import lighthouse, serving_lighthouse  # noqa: F401
from tests.rows import some_of
from tests.worlds import be_launched, run_world
from xffl.distributed.startup.isolation import enter_isolation
from xffl.integrations.checkpoints import MARKER
from xffl.training.data.partition import iid

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

STEPS = 12
EVERY = 4
ROWS = 4
LENGTH = 32
SAMPLES = 400
SIZES = (2, 2)
Weights = dict[str, torch.Tensor]


class Text(Dataset[dict[str, torch.Tensor]]):
    """Bytes of the Python manual; the last ones of each third row are padding."""

    def __init__(self) -> None:
        text = "\n".join(topics.topics.values()).encode()[: SAMPLES * LENGTH]
        self._bytes = torch.tensor(list(text)).view(SAMPLES, LENGTH)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self._bytes[index].clone()
        labels[0] = -100  # is not predicted, and transformers before 5.10 counts it all the same
        if index % 3 == 0:
            labels[index % LENGTH :] = -100
        return {"input_ids": self._bytes[index], "labels": labels}


def make_model(seed: int = 0, *, is_adapted: bool = False, vocabulary: int = 256) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    torch.manual_seed(seed)
    if is_adapted:
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    if seed:
        nn.init.normal_(model.lm_head.weight)  # a cell that does not begin as cell 0 does
    return model


def run_job(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Be a launcher of ranks that are forked, so that what took seconds to import is there; return what each returned.

    As a launcher does, it kills the others when a rank has died; one that was killed has returned nothing.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder, str(rank)) for rank in range(world_size)]
        running = {}
        for rank, result in enumerate(results):
            process = os.fork()
            if process == 0:
                be_forked(result, partial(fn, rank, world_size, port, *args))
            running[process] = rank
        while running:
            process, status = os.wait()
            running.pop(process, None)
            for other in running if status else ():
                os.kill(other, signal.SIGKILL)
        return [pickle.loads(result.read_bytes()) if result.exists() else None for result in results]


def be_forked(result: Path, run: Callable[[], Any]) -> NoReturn:
    """Be a rank in a process that was forked, and end it."""
    status = 1
    try:
        result.write_bytes(pickle.dumps(run()))
        status = 0
    except BaseException:  # noqa: BLE001 - this process goes no further
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def make_trainer(folder: str, model: Any, *, is_sharded: bool = False, **given: Any) -> Any:
    from accelerate.state import DistributedType, PartialState
    from transformers import Trainer, TrainingArguments

    if is_sharded:
        plan = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        given |= {"fsdp": True, "fsdp_config": {**plan, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    options: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "logging_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "average_tokens_across_devices": True,  # as transformers 5 does by itself
        "seed": 1,
    }
    args = TrainingArguments(output_dir=folder, **{**options, **given})
    if is_sharded:
        # accelerate leaves FSDP out on CPUs without a word; with the type of GPUs it does not.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    data = Text()
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=Subset(data, range(2 * ROWS)))
    trainer._get_train_sampler = lambda *_: SequentialSampler(trainer.train_dataset)
    return trainer


def weights_of(model: nn.Module) -> Weights:
    """Return the whole weights, under the names of the model without wrappers; collective over the cell."""
    bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    whole: dict[str, Any] = {name: value for name, value in bare.named_parameters() if value.requires_grad}
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in whole.items()
    }


def load_sharded(model: Any, folder: str) -> Any:
    """Load a model as transformers itself shards it over the default group."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    files = f"{folder}/files{os.environ['RANK']}"
    model.save_pretrained(files)
    return LlamaForCausalLM.from_pretrained(files, distributed_config=DistributedConfig(fsdp_size=SIZES[0]))


def train(
    folder: str,
    cell: int,
    seed: int,
    *,
    is_adapted: bool = False,
    is_sharded: bool = False,
    is_loaded: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Be a rank of a Trainer's script, with one line more."""
    from transformers import TrainerCallback
    from transformers.trainer_callback import ProgressCallback

    from xffl.integrations.transformers import federate

    sent: list[dict[tuple[int, int], int]] = []

    class Counters(TrainerCallback):  # type: ignore[misc]
        """Reads the kernel's counters when rounds are set up, and after the step behind which the last one comes."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            sent.append(sent_by_ports())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == STEPS:
                sent.append(sent_by_ports())

    model = make_model(seed, is_adapted=is_adapted)
    if is_loaded:
        model = load_sharded(model, f"{folder}/{cell}")
    # Each cell evaluates what a round has just written.
    evaluation: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": EVERY, "disable_tqdm": False}
    trainer = make_trainer(folder, model, is_sharded=is_sharded, **evaluation)
    rounds = federate(trainer, every=EVERY, **options)
    trainer.add_callback(Counters())
    trainer.train()
    (bar,) = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ProgressCallback))
    log = [line for line in trainer.state.log_history if "xffl/round" in line]
    return {
        "weights": weights_of(trainer.model_wrapped),
        "counts": [report.weights for report in rounds.reports],
        "bytes": [report.bytes_across for report in rounds.reports],
        "sent": {ports: count - sent[0].get(ports, 0) for ports, count in sent[1].items()},
        "logged": [(line["step"], line["xffl/round"], line["xffl/cells"]) for line in log],
        "losses": sum("loss" in line for line in trainer.state.log_history),
        "evaluated": [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line],
        "steps shown": bar.current_step if trainer.is_world_process_zero() else None,
        "wrapper": type(trainer.model_wrapped).__name__,
    }


def train_by_hand(*, is_adapted: bool = False) -> dict[str, Any]:
    """Do with xffl alone what Trainer does: a loss over the tokens of the cell's whole step, clipping, cosine."""
    from transformers import get_scheduler
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    reports: list[xffl.RoundReport] = []
    counted: list[int] = []

    def take() -> float:
        tokens = sum(counted)
        counted.clear()
        return float(tokens)

    with xffl.session(federated=SIZES) as state:
        data = Text()
        part = iid(SAMPLES, 2).parts[state.cell].tolist()
        batches = [part[start : start + ROWS] for start in range(0, len(part), ROWS)][state.cell_rank :: SIZES[0]]
        model = xffl.shard(make_model(is_adapted=is_adapted), state, wrap=(LlamaDecoderLayer,))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)
        schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=STEPS)
        with xffl.FederatedScaling(model, optimizer, state, every=EVERY, weight=take, on_round=reports.append):
            for step in range(STEPS):
                samples = [[data[index] for index in batches[2 * step + turn]] for turn in range(2)]
                inputs = [torch.stack([sample["input_ids"] for sample in batch]) for batch in samples]
                labels = [torch.stack([sample["labels"] for sample in batch])[:, 1:] for batch in samples]
                counted.append(sum(int(batch.ne(-100).sum()) for batch in labels))
                total = torch.tensor(float(counted[-1]))
                dist.all_reduce(total, group=state.federation)
                for batch, wanted in zip(inputs, labels, strict=True):
                    logits = model(input_ids=batch).logits[:, :-1].flatten(0, 1)
                    loss = nn.functional.cross_entropy(logits, wanted.flatten(), reduction="sum")
                    (loss / total * SIZES[0]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return {"weights": weights_of(model), "counts": [report.weights for report in reports]}


CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"is_sharded": True},
    "lora": {"is_adapted": True, "is_sharded": True},
    "distributed_config": {"is_loaded": True},
}


def be_by_hand(rank: int, world_size: int, port: int) -> dict[str, dict[str, Any]]:
    be_launched(rank, world_size, port)
    return {"full": train_by_hand(), "adapted": train_by_hand(is_adapted=True)}


def be_cell(rank: int, world_size: int, port: int, options: dict[str, Any]) -> dict[str, Any]:
    be_launched(rank, world_size, port)
    with enter_isolation(SIZES) as isolated:
        return train(cell=isolated.cell, seed=isolated.cell, **options)


def be_elastic_cell(
    rank: int, world_size: int, port: int, url: str, other_port: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Be a rank of a cell that is a job of its own, of two that begin together, with the same weights."""
    cell, cell_rank = divmod(rank, SIZES[0])
    be_launched(cell_rank, SIZES[0], (port, other_port)[cell])
    home = options["folder"]
    os.environ |= {"XFFL_LIGHTHOUSE": url, "XFFL_CELL": f"{cell}/2", "XFFL_JOURNAL": f"{home}/journal"}
    Path(home).mkdir(parents=True, exist_ok=True)
    await_cells(2, home)
    return train(cell=cell, seed=0, **options)


def import_once() -> None:
    """Import what the ranks would import each by itself."""
    import_module("peft")
    for name in ("trainer", "models.llama.modeling_llama", "training_args"):
        import_module(f"transformers.{name}")


def be_naive(rank: int, world_size: int, port: int, folder: str) -> str:
    """Be a rank of a script that trains several cells in one world."""
    from xffl.integrations.transformers import federate

    be_launched(rank, world_size, port)
    with xffl.session(federated=(1, 1)), pytest.raises(xffl.ConfigError) as refused:
        federate(make_trainer(folder, make_model()), every=3)
    return str(refused.value)


Ways = tuple[tuple[str, ...], tuple[str, ...]]
SOME: Ways = ("ddp", "lora"), ("ddp",)
"""Cases of isolated cells, and those of them that elastic cells train, too: with DDP, and with FSDP2 and adapters"""
MORE: Ways = ("fsdp", "distributed_config"), ("fsdp",)
"""Which a nightly run trains"""


def train_elastic(name: str, url: str, folder: str) -> list[dict[str, Any]]:
    return run_job(4, be_elastic_cell, url, free_port(), {"folder": f"{folder}/{name}-elastic", **CASES[name]})


VOTES = 4096
"""Bytes that a rank may send to the other cell for a round's votes: it sends 1,250, in elastic cells 2,030"""


def check_counters(of_ranks: list[dict[str, Any]]) -> None:
    """See that the kernel has sent to the other cell what the reports say, with no more than votes beside it."""
    for rank, trained in enumerate(of_ranks):
        others = of_ranks[SIZES[0] :] if rank < SIZES[0] else of_ranks[: SIZES[0]]
        peers = {(local, remote) for other in others for remote, local in other["sent"]}
        counted = sum(count for ports, count in trained["sent"].items() if ports in peers)
        assert 0 <= counted - sum(trained["bytes"]) <= VOTES * len(trained["bytes"])


def train_all_ways(
    rank: int, world_size: int, folder: str, names: tuple[str, ...], lighthouses: dict[str, str]
) -> tuple[Any, ...]:
    """Train by hand, with a Trainer in isolated cells, naively, and with a Trainer in elastic cells."""
    from transformers.distributed import DistributedConfig

    import_once()
    cases = {
        name: CASES[name]
        for name in names
        if "is_loaded" not in CASES[name] or hasattr(DistributedConfig, "fsdp_size")  # not in the first transformers 5
    }
    ranks = {name: run_job(4, be_cell, {"folder": f"{folder}/{name}", **options}) for name, options in cases.items()}
    elastic = {name: train_elastic(name, url, folder) for name, url in lighthouses.items()}
    return run_job(4, be_by_hand), ranks, run_job(2, be_naive, f"{folder}/naive"), elastic


def differ(mine: Weights, theirs: Weights) -> float:
    assert list(mine) == list(theirs)
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


@contextmanager
def serving_lighthouses(names: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Serve each elastic run with a lighthouse; none without torchft."""
    if find_spec("torchft") is None:
        yield {}
        return
    with ExitStack() as opened:
        yield {name: opened.enter_context(serving_lighthouse()) for name in names}


@pytest.mark.parametrize(("names", "elastic_names"), some_of((SOME, MORE), MORE), ids=["some", "more"])
def test_a_trainer_trains_what_a_loop_by_hand_trains(
    tmp_path: Path, names: tuple[str, ...], elastic_names: tuple[str, ...]
) -> None:
    with serving_lighthouses(elastic_names) as lighthouses:
        [(by_hand, ranks, refusals, elastic)] = run_world(
            1, train_all_ways, str(tmp_path), names, lighthouses, init=False, timeout_s=280
        )
    for name, of_ranks in elastic.items():  # nothing fails, so these are the rounds of isolated cells
        check_counters(of_ranks)
        for trained in of_ranks:
            assert differ(trained["weights"], ranks[name][0]["weights"]) == 0.0
            assert differ(trained["weights"], by_hand[0]["full"]["weights"]) < 1e-6, name
            assert trained["counts"] == by_hand[0]["full"]["counts"]
            assert trained["wrapper"] == ranks[name][0]["wrapper"]
    for name, of_ranks in ranks.items():
        options = CASES[name]
        expected = by_hand[0]["adapted" if options.get("is_adapted") else "full"]
        for trained in of_ranks:
            assert differ(trained["weights"], of_ranks[0]["weights"]) == 0.0
            assert differ(trained["weights"], expected["weights"]) < 1e-6, name
            assert trained["counts"] == expected["counts"]
            assert trained["logged"] == [(4, 1, 2), (8, 2, 2), (12, 3, 2)]
            assert trained["losses"] == 3
            assert trained["evaluated"] == of_ranks[0]["evaluated"]  # by both cells, of the model that all agree on
            assert len(set(trained["evaluated"])) == 3
            assert trained["steps shown"] in (STEPS, None)
            assert trained["wrapper"].startswith(
                "FSDP" if {"is_sharded", "is_loaded"} & options.keys() else "DistributedDataParallel"
            )
        values = sum(value.numel() for value in expected["weights"].values())
        assert sum(sum(trained["bytes"]) for trained in of_ranks) == 3 * 2 * 4 * values  # fp32, once from each cell
        check_counters(of_ranks)
    for refused in refusals:
        assert "default group, which holds all 2 ranks of this job" in refused
        assert "start with xffl exec --isolate --federated" in refused


def kill_at(event: int, folder: str, mark: str = "checkpoint-") -> None:
    """Let this process die just before it changes a path in the folder that has the mark for so many times."""
    changes = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}
    passed = count(1)

    def hear(name: str, given: tuple[Any, ...]) -> None:
        is_change = name in changes or (name == "open" and isinstance(given[2], int) and given[2] & os.O_CREAT)
        if is_change and all(part in str(given[:2]) for part in (mark, folder)) and next(passed) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)


@dataclass(frozen=True)
class Death:
    """Which rank dies, before which local step or which change of a checkpoint, or after its last round."""

    rank: int = -1
    moment: Literal["step", "file", "end"] = "step"
    number: int = 0


def be_mortal(rank: int, world_size: int, port: int, folder: str, death: Death, *, is_sharded: bool = False) -> Any:
    """Train with checkpoints, until death."""
    from transformers import TrainerCallback

    from xffl.integrations.transformers import federate

    dies = death.rank == rank

    class Mortality(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if dies and death.moment == "step" and state.global_step == death.number:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if dies and death.moment == "end":
                os.kill(os.getpid(), signal.SIGKILL)

    be_launched(rank, world_size, port)
    with enter_isolation((world_size // 2, world_size // 2)) as isolated:
        model = make_model(isolated.cell)
        saves = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
        trainer = make_trainer(folder, model, is_sharded=is_sharded, gradient_accumulation_steps=1, **saves)
        rounds = federate(trainer, every=3, algorithm="diloco")
        trainer.add_callback(Mortality())
        if dies and death.moment == "file":
            kill_at(death.number, folder)
        trainer.train()
        steps = 0 if rounds.resumed is None else rounds.resumed.step
        kept = sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))
        return weights_of(trainer.model_wrapped), steps, kept


DEATHS = {Death(0, "step", 5): 2, Death(0, "file", 16): 2, Death(1, "end"): 12}
"""And the step from which the run goes on then, at least: between rounds, in the second save, behind the last step."""


def kill_and_start_again(rank: int, world_size: int, folder: str) -> list[list[Any]]:
    """Return what an uninterrupted run has, then what each run has that was killed and started again."""
    import_once()
    runs = [run_job(2, be_mortal, f"{folder}/whole", Death())]
    for number, death in enumerate(DEATHS):
        assert None in run_job(2, be_mortal, f"{folder}/{number}", death), death
        runs.append(run_job(2, be_mortal, f"{folder}/{number}", Death()))
    return runs


def test_a_run_that_was_killed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    [(whole, *resumed)] = run_world(1, kill_and_start_again, str(tmp_path), init=False, timeout_s=280)
    for run, step in zip(resumed, DEATHS.values(), strict=True):
        for weights, from_step, kept in run:
            assert from_step >= step
            assert differ(weights, whole[0][0]) == 0.0
            assert kept[-1] == "checkpoint-12"


UNEVEN = (20, 36)
"""Samples of each cell's own data, of which a step takes :data:`ROWS`"""


def be_uneven(
    rank: int, world_size: int, port: int, folder: str, death: Death, every: Any = EVERY, samples: Any = UNEVEN
) -> Any:
    """Train two epochs of data of each cell's own, saving after each, until death."""
    from transformers import TrainerCallback

    from xffl.integrations.transformers import federate

    class Mortality(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if rank == death.rank and death.moment == "step" and state.global_step == death.number:
                while rank == 1 and not Path(folder, "cell_0", "checkpoint-10", MARKER).exists():
                    time.sleep(0.02)  # cell 0, which has made its last step, still saves
                os.kill(os.getpid(), signal.SIGKILL)

    be_launched(rank, world_size, port)
    with enter_isolation((1, 1)) as isolated:
        part: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 1}
        trainer = make_trainer(folder, make_model(), save_strategy="epoch", save_total_limit=1, **part)
        trainer.train_dataset = Subset(Text(), range(samples[isolated.cell]))
        rounds = federate(trainer, data="own", every=every, algorithm="diloco")
        trainer.add_callback(Mortality())
        if rank == death.rank and death.moment == "file":
            kill_at(death.number, folder, "checkpoint-10")
        trainer.train()
    resumed = None if rounds.resumed is None else (rounds.resumed.meetings, rounds.resumed.step)
    kept = {
        path.parent.name: json.loads(path.read_text())["meetings"]
        for path in Path(folder).glob(f"cell_{rank}/*/{MARKER}")
    }
    return weights_of(trainer.model_wrapped), trainer.state.global_step, resumed, kept


UNEVEN_DEATHS = {
    Death(0, "file", 3): [(2, 8), (2, 8)],  # while cell 0 saves behind its last step
    Death(1, "step", 14): [(3, 10), (3, 12)],
}
"""And the rounds and steps from which each cell goes on then"""
SCHEDULED = "per_cell:counts=[2,4]", (36, 36)
"""A schedule by which cell 0 comes to the end of its equally long data after twice as many rounds"""


def kill_uneven(rank: int, world_size: int, folder: str) -> list[list[Any]]:
    """Return what runs of unequally long data have: one, the same started again, and those that were killed.

    Behind them, of a schedule of unequal steps, a run that was killed, the same started again, and one that was not.
    """
    import_once()
    runs = [run_job(2, be_uneven, f"{folder}/whole", Death()) for _ in range(2)]
    for number, death in enumerate(UNEVEN_DEATHS):
        assert None in run_job(2, be_uneven, f"{folder}/{number}", death), death
        runs.append(run_job(2, be_uneven, f"{folder}/{number}", Death()))
    for name, death in (("scheduled", Death(0, "step", 9)), ("scheduled", Death()), ("scheduled-whole", Death())):
        runs.append(run_job(2, be_uneven, f"{folder}/{name}", death, *SCHEDULED))
    return runs


def test_cells_with_unequally_long_data_save_after_the_same_rounds(tmp_path: Path) -> None:
    told = run_world(1, kill_uneven, str(tmp_path), init=False, timeout_s=280)
    [(whole, again, *killed, scheduled_killed, scheduled, scheduled_whole)] = told
    assert None in scheduled_killed
    assert [cell[2] for cell in scheduled] == [(3, 6), (3, 12)]
    for cell in (*scheduled, *scheduled_whole):
        assert differ(cell[0], scheduled_whole[0][0]) == 0.0
    last = whole[0][3]["checkpoint-10"]
    assert whole[1][3]["checkpoint-18"] == last
    assert [cell[1:3] for cell in whole] == [(10, None), (18, None)]
    assert [cell[2] for cell in again] == [(last, 10), (last, 18)]
    for run, resumed in zip(killed, UNEVEN_DEATHS.values(), strict=True):
        assert [cell[2] for cell in run] == resumed
    for cell in (*whole, *again, *(cell for run in killed for cell in run)):
        assert differ(cell[0], whole[0][0]) == 0.0


def be_scripted(rank: int, world_size: int, port: int, folder: str) -> tuple[Weights, Weights, list[int], int]:
    """Be a rank of a script with callbacks, one of which asks for a save while a round is under way."""
    from transformers import TrainerCallback

    from xffl.integrations.transformers import federate

    saved: list[int] = []
    at_end: list[Weights] = []

    class Script(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save |= state.global_step == EVERY + 1

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            saved.append(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            at_end.append(weights_of(trainer.model_wrapped))

    be_launched(rank, world_size, port)
    with enter_isolation((1, 1)) as isolated:
        part: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 0.24, "gradient_accumulation_steps": 1}
        trainer = make_trainer(folder, make_model(isolated.cell), save_strategy="epoch", **part)
        federate(trainer, every=EVERY, delay=2, aggregator={"overlap": True})
        trainer.add_callback(Script())
        with pytest.raises(xffl.StateError, match="federated already"):
            federate(trainer, every=EVERY)
        trainer.train()
        return weights_of(trainer.model_wrapped), at_end[0], saved, trainer.state.global_step


ROUNDS: dict[str, dict[str, Any]] = {
    "fragments, delayed, encoded": {"algorithm": "streaming_diloco", "aggregator": {"codec": "int8"}},
    "corrected steps": {"client": "scaffold"},
}
"""Options of rounds, each of which has a state of its own in a checkpoint"""


class BreakDown(Exception):
    """An error of a script, on all ranks."""


def be_resumed(rank: int, world_size: int, port: int, folder: str) -> dict[str, tuple[Weights, Weights, int]]:
    """Train with all kinds of rounds, in one go, and with an error after which another Trainer goes on."""
    from transformers import TrainerCallback

    from xffl.integrations.transformers import federate

    class Error(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 9:
                raise BreakDown

    def make(path: str, options: dict[str, Any]) -> tuple[Any, Any]:
        part: dict[str, Any] = {"gradient_accumulation_steps": 1, "save_steps": 7, "optim": "sgd"}
        trainer = make_trainer(path, make_model(isolated.cell), save_strategy="steps", **part)
        return trainer, federate(trainer, every=3, **options)

    be_launched(rank, world_size, port)
    trained = {}
    with enter_isolation((world_size // 2,) * 2) as isolated:
        for name, options in ROUNDS.items():
            whole, _ = make(f"{folder}/{name}/whole", options)
            whole.train()
            broken, _ = make(f"{folder}/{name}/broken", options)
            broken.add_callback(Error())
            with pytest.raises(BreakDown):
                broken.train()
            mended, rounds = make(f"{folder}/{name}/broken", options)
            mended.train()
            steps = 0 if rounds.resumed is None else rounds.resumed.step
            trained[name] = weights_of(whole.model_wrapped), weights_of(mended.model_wrapped), steps
    return trained


def resume_rounds(rank: int, world_size: int, folder: str) -> list[Any]:
    import_once()
    return run_job(2, be_resumed, folder)


def test_rounds_of_all_kinds_go_on_to_the_same_bits(tmp_path: Path) -> None:
    [ranks] = run_world(1, resume_rounds, str(tmp_path), init=False, timeout_s=280)
    for name in ROUNDS:
        for trained in ranks:
            whole, mended, step = trained[name]
            assert step == 7
            assert differ(whole, ranks[0][name][0]) == differ(mended, whole) == 0.0, name


def be_unlike(rank: int, world_size: int, port: int, folder: str) -> str:
    """Be a rank of a script whose cells have made the weights below their adapters each by itself."""
    from xffl.integrations.transformers import federate

    be_launched(rank, world_size, port)
    with enter_isolation((1, 1)) as isolated:
        model = make_model(is_adapted=True)
        frozen = next(parameter for parameter in model.parameters() if not parameter.requires_grad)
        frozen.data += isolated.cell
        trainer = make_trainer(folder, model)
        federate(trainer, every=EVERY)
        with pytest.raises(xffl.ConfigError if rank == 0 else (xffl.ConfigError, xffl.LaunchError)) as refused:
            trainer.train()
    return str(refused.value)


def run_scripts(rank: int, world_size: int, folder: str) -> tuple[list[Any], list[Any], list[str]]:
    import_once()
    runs = [run_job(2, be_scripted, f"{folder}/scripted") for _ in range(2)]
    return runs[0], runs[1], run_job(2, be_unlike, f"{folder}/unlike")


def test_callbacks_of_a_script_and_a_part_of_an_epoch(tmp_path: Path) -> None:
    [(first, again, refusals)] = run_world(1, run_scripts, str(tmp_path), init=False, timeout_s=280)
    for weights, at_end, saved, step in first:
        assert (saved, step) == ([EVERY + 1, 12], 12)
        assert differ(weights, at_end) == differ(weights, first[0][0]) == 0.0
    for weights, _, saved, step in again:  # it was over: neither a step nor a save over the whole checkpoint
        assert (saved, step) == ([], 12)
        assert differ(weights, first[0][0]) == 0.0
    assert (
        "frozen parameters differ between the cells" in refusals[0]
    )  # that of the other one may be that this has ended


LONE_ROUNDS = 2
"""That the cell which lives makes before it waits for the other one to come back"""
LAST_ROUNDS = 3
"""To which both cells give steps then"""


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


def is_at_end(gave: list[int], folder: str, *, is_back: bool) -> bool:
    """Wait for the other cell where this one has gone on alone; tell whether both have given steps since it is back.

    :param gave: How many cells gave steps to each round of this process.
    :param folder: Where the test and the cells tell each other.
    :param is_back: Whether this is the cell that was killed, in its second life.
    """
    if gave.count(1) == LONE_ROUNDS:
        Path(folder, "is_alone").touch()
        wait_for(Path(folder, "came_back"))
    since = 0 if is_back else gave.index(1) if 1 in gave else len(gave)
    return gave[since:].count(2) == LAST_ROUNDS


def be_elastic(cell: int, port: int, url: str, folder: str, *, is_back: bool) -> tuple[Weights, float, list[int], bool]:
    """Be a cell of one rank, and a job of its own; cell 1 dies in its first life."""
    from transformers import TrainerCallback

    from xffl.integrations.transformers import federate

    class Course(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if cell == 1 and not is_back and state.global_step == 2 * EVERY + 1:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gave = [sum(weight > 0 for weight in report.weights) for report in rounds.reports]
            if is_at_end(gave, folder, is_back=is_back):
                control.should_training_stop = True

    be_launched(0, 1, port)
    os.environ |= {"XFFL_LIGHTHOUSE": url, "XFFL_CELL": f"{cell}/2", "XFFL_RESTARTS": str(int(is_back))}
    options: dict[str, Any] = {"gradient_accumulation_steps": 1, "max_steps": 10**4, "save_steps": EVERY}
    trainer = make_trainer(folder, make_model(cell), save_strategy="steps", **options)
    rounds = federate(trainer, every=EVERY)
    trainer.add_callback(Course())
    await_cells(2, folder)
    if is_back:
        Path(folder, "came_back").touch()
    trainer.train()
    cells = [line["xffl/cells"] for line in trainer.state.log_history if "xffl/cells" in line]
    return weights_of(trainer.model), rounds.total_weight, cells, rounds.resumed is not None


def lose_a_cell(
    rank: int, world_size: int, url: str, folder: str, prepare: Callable[[], Any], be_cell: Callable[..., Any]
) -> list[Any]:
    """Be a launcher of two cells, and start one again after its death; return what each has returned.

    :param prepare: Imports what both need.
    :param be_cell: Trains, as :func:`be_elastic`.
    """
    prepare()
    results = [Path(folder, str(cell)) for cell in range(2)]
    running: dict[int, int] = {}

    def start(cell: int, *, is_back: bool) -> None:
        port = free_port()
        process = os.fork()
        if process == 0:
            be_forked(results[cell], partial(be_cell, cell, port, url, folder, is_back=is_back))
        running[process] = cell

    for cell in range(2):
        start(cell, is_back=False)
    while running:
        process, status = os.wait()
        cell = running.pop(process)
        if os.WIFSIGNALED(status):
            wait_for(Path(folder, "is_alone"))
            start(cell, is_back=True)
        elif status:
            raise ChildProcessError(f"cell {cell} has failed")
    return [pickle.loads(result.read_bytes()) for result in results]


@pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")
def test_a_lost_cell_of_an_elastic_run_comes_back_and_contributes(lighthouse: str, tmp_path: Path) -> None:  # noqa: F811
    check_that_it_came_back(lighthouse, tmp_path, import_once, be_elastic)


def check_that_it_came_back(url: str, folder: Path, prepare: Callable[[], Any], be_cell: Callable[..., Any]) -> None:
    """Lose a cell; see that the other one went on alone, then both together, to the same end."""
    told = run_world(1, lose_a_cell, url, str(folder), prepare, be_cell, init=False, timeout_s=200)
    [(stayed, returned)] = told
    weights, total_weight, cells, is_resumed = stayed
    assert not is_resumed
    assert cells[0] == 2
    assert cells.count(1) >= LONE_ROUNDS
    assert returned[3]
    for counted in (cells, returned[2]):
        assert counted[-LAST_ROUNDS:] == [2] * LAST_ROUNDS
    assert returned[1] == total_weight > 0
    assert differ(weights, returned[0]) == 0.0
