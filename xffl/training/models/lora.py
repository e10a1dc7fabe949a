"""Low-rank adapters by peft: the model stays frozen, and small factors beside its layers train and take part in rounds.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xffl.aggregation.engine.planning.tensors import tensors_of
from xffl.checkpoint.format import check_path, run_collectively, this_cell
from xffl.checks import integer, number
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.values.sharding import reshard
from xffl.errors import ConfigError
from xffl.files import naming_errors
from xffl.parallel.spread import is_meta
from xffl.training.models.weights import ADVICE, bare_model, is_adapter, new_folder, package, whole

__all__ = ["adapter_state", "add_lora", "save_adapters"]

ADAPTER = "default"
"""Name of the one adapter, which peft leaves out of files."""

WRITTEN = ("adapter_model.safetensors", "adapter_config.json")
"""What :func:`save_adapters` writes"""


def add_lora(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16,
    target_modules: str | Sequence[str] | None = None,
    dropout: float = 0.0,
    use_rslora: bool = False,
) -> nn.Module:
    """Freeze a model and put trainable low-rank factors beside its linear layers; local, before the model is sharded.

    The output stays as it is at first, since one of the two factors is zero. A round moves the factors alone: frozen
    parameters are ``local`` to a cell, so all cells have to stand on the same base model
    (:func:`xffl.training.models.weights.agree_on_base`). On the meta device give ``wrap_model`` a
    :class:`~xffl.training.models.building.ModuleInitializer` of what this returns.

    :param model: A model of transformers; it is changed in place.
    :param rank: Rank of the factors, at least 1.
    :param alpha: The factors' product counts ``alpha / rank`` (``alpha / sqrt(rank)`` with ``use_rslora``).
    :param target_modules: Names of layers, or a regular expression; by default what peft knows of the architecture,
        ``"all-linear"`` for all but the head.
    :param dropout: Share of what goes into the factors that is dropped in training, in [0, 1).
    :param use_rslora: Whether the product is scaled by the square root of the rank (https://arxiv.org/abs/2312.03732).
    :return: peft's model around the given one.
    :raises ConfigError: if an argument is invalid, or peft is not installed.
    """
    peft = package("peft")
    if not isinstance(model, package("transformers").PreTrainedModel):
        raise ConfigError(f"model must be a model of transformers without adapters, got a {type(model).__name__}")
    rank = integer("rank of adapters", rank)
    dropout = number("dropout of adapters", dropout, 0, below=1)
    layers = target_modules if target_modules is None or isinstance(target_modules, str) else list(target_modules)
    asked = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=layers,
        lora_dropout=dropout,
        use_rslora=use_rslora,
        task_type="CAUSAL_LM",
    )
    bare = is_meta(model)
    try:
        made: nn.Module = peft.get_peft_model(model, asked, adapter_name=ADAPTER, low_cpu_mem_usage=bare)
    except ValueError as wrong:
        raise ConfigError(f"adapters for {target_modules!r} cannot be made: {wrong}; name linear layers") from wrong
    others = [name for name, parameter in made.named_parameters() if parameter.requires_grad and not is_adapter(name)]
    if others:
        raise ConfigError(f"peft also trains {others[0]!r}; name linear layers only in target_modules")
    return made


def adapter_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the adapters alone, whole and on the CPU, by the names that peft's files give them.

    Collective over the cell.

    :param model: What ``strategy.wrap_model`` or ``xffl.shard`` returned of a model with adapters.
    :return: The factors by name.
    :raises ConfigError: if the model has no adapters.
    """
    inner = _adapted(model)
    reshard(inner)
    tensors = {name: tensor for name, _, _, tensor in tensors_of(inner) if is_adapter(name)}
    # Copies, which what is trained further does not change.
    found = {name: whole(tensor).to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    state: dict[str, torch.Tensor] = package("peft").get_peft_model_state_dict(
        inner, state_dict=found, adapter_name=ADAPTER, save_embedding_layers=False
    )
    return state


def save_adapters(model: nn.Module, folder: str | os.PathLike[str], state: DistributedState) -> None:
    """Write the adapters alone as a folder that ``peft.PeftModel.from_pretrained`` loads onto the base model.

    Collective over the job: cell 0 gathers, and rank 0 writes ``adapter_model.safetensors`` and
    ``adapter_config.json``; the others wait. A folder of this name is replaced once the new one is finished, if nothing
    else is in it.

    :param model: What ``strategy.wrap_model`` or ``xffl.shard`` returned of a model with adapters.
    :param folder: The folder to write, on rank 0's file system.
    :param state: The state that says where this rank stands.
    :raises CheckpointError: if it cannot be written; on all ranks.
    :raises ConfigError: if an argument is invalid; on all ranks.
    """

    def check() -> tuple[Path, int]:
        _adapted(model)
        return check_path(folder), this_cell(state).number

    path, number = run_collectively(
        "comparing adapters",
        act=check,
        path=Path(str(folder)),
        advice=ADVICE,
        show=lambda found: str(found[0]),
        world=state.job_group,
    )

    def write() -> None:
        tensors = adapter_state(model) if number == 0 else {}
        if target is not None:
            with naming_errors(target / WRITTEN[0]):
                package("safetensors.torch").save_file(tensors, target / WRITTEN[0], metadata={"format": "pt"})
            config = copy.deepcopy(_adapted(model).peft_config[ADAPTER])
            config.inference_mode = True  # what peft writes: loaded adapters are frozen unless asked otherwise
            config.save_pretrained(target)

    with new_folder(path, WRITTEN, is_writer=state.is_first_of_job, world=state.job_group) as target:
        run_collectively("writing adapters", write, path, ADVICE, world=state.job_group)


def _adapted(model: nn.Module) -> Any:
    """Return peft's model."""
    inner: Any = bare_model(model)
    if ADAPTER not in getattr(inner, "peft_config", {}):
        raise ConfigError(f"{type(inner).__name__} has no adapters of add_lora")
    return inner
