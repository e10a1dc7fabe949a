"""Tensor parallelism: the layers of a decoder-only transformer cut over the ranks of a mesh, by torch's own styles.

Query, key, value and the MLP's first projections are cut by their outputs (whole heads), the projections behind them
by their inputs, the embedding and the head by the vocabulary. With ``sequence_parallel`` the activations between blocks
are cut along the sequence, so each block gathers twice and reduce-scatters twice in its forward pass; without it they
are whole on every rank, and each block all-reduces twice. Every parameter becomes a DTensor over the mesh (norms as
replicas), so that FSDP2 and gradient norms meet one kind of parameter.

Dropout draws from the rank's own generator: between blocks it needs equal seeds over the mesh without
``sequence_parallel`` and different ones with it, inside attention different ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from xffl.checks import closest, group, shorten
from xffl.errors import ConfigError
from xffl.parallel.axes.context_parallel import check_mesh, fill_positions, find_positions

__all__ = ["GatheredInput", "Replicated", "apply_tensor_parallel", "plan_for"]

QUERIES = ("q_proj", "wq")
KEYS = ("k_proj", "v_proj", "wk", "wv")
COLUMNS = (*QUERIES, *KEYS, "gate_proj", "up_proj", "c_fc", "fc1", "w1", "w3")
ROWS = ("o_proj", "out_proj", "wo", "down_proj", "c_proj", "fc2", "w2")
NORMS = (
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    *("norm", "final_layernorm", "attention_norm", "ffn_norm", "ln_1", "ln_2", "ln_f"),
)
HEAD_NORMS = ("q_norm", "k_norm")
EMBEDDINGS = ("embed_tokens", "tok_embeddings", "wte")
POSITIONS = ("wpe",)
HEADS = ("lm_head", "output")
FUSED = ("c_attn", "qkv_proj", "query_key_value", "Wqkv", "in_proj", "gate_up_proj")

HEAD_WIDTHS = ("head_dim", "head_width", "head_size")
QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def plan_for(
    model: nn.Module, *, sequence_parallel: bool = True, loss_parallel: bool = False
) -> dict[str, ParallelStyle]:
    """Make the plan of a decoder-only transformer, whose layers are known by the last part of their names.

    Nothing moves and the model stays as it is. Known are the names of the Llama family and those of GPT-2 where
    queries, keys and values have projections of their own; a stage of a pipeline may lack the embedding or the head.
    The plan, styles by full name of a module, can be changed and given to :func:`apply_tensor_parallel`.

    With ``sequence_parallel`` activations between blocks are cut along the sequence (dimension 1). With
    ``loss_parallel`` the logits stay cut by the vocabulary, as DTensors, for a loss under torch's ``loss_parallel``;
    else every rank gets all of them.
    """
    names = {name: module for name, module in model.named_modules() if name}
    if fused := [name for name in names if _leaf(name) in FUSED]:
        raise ConfigError(
            f"{shorten(fused)}: one layer computes several projections, and equal cuts of it would mix them; "
            "give a plan of your own, or a model with separate projections (q_proj, k_proj, v_proj)"
        )
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    # Modules that only compute projections of their input: not blocks with norms of their own.
    with_norms = {_parent(name) for name in names if _leaf(name) in NORMS}
    entered = {_parent(name) for name in names if _leaf(name) in COLUMNS} - with_norms - {""}
    logits: Placement = Shard(-1) if loss_parallel else Replicate()
    head = ColwiseParallel(input_layouts=stream, output_layouts=logits, use_local_output=not loss_parallel)
    styles: dict[str, ParallelStyle] = {
        **dict.fromkeys(COLUMNS, ColwiseParallel(input_layouts=stream)),
        **dict.fromkeys(ROWS, RowwiseParallel(output_layouts=stream)),
        **dict.fromkeys(NORMS, Replicated(layout=stream)),
        # (batch, sequence, heads, width): each rank has some of the heads.
        **dict.fromkeys(HEAD_NORMS, Replicated(layout=Shard(2))),
        **dict.fromkeys(EMBEDDINGS, RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)),
        **dict.fromkeys(POSITIONS, Replicated(output_layout=Shard(-2) if sequence_parallel else None)),
        **dict.fromkeys(HEADS, head),
    }
    plan: dict[str, ParallelStyle] = {}
    for name, module in names.items():
        style = styles.get(_leaf(name))
        if _leaf(name) in COLUMNS and _parent(name) in entered:
            style = ColwiseParallel(
                input_layouts=Replicate()
            )  # its input is made whole for all projections that read it
        if name in entered:
            plan[name] = GatheredInput(layout=stream)
        elif style is not None and any(True for _ in module.parameters(recurse=False)):
            plan[name] = style
    _check_pairs(names, plan)
    _check_covers(model, plan, "the plan for transformers does not know this layer; give a plan of your own, with")
    return plan


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, ParallelStyle] | None = None,
    sequence_parallel: bool = True,
    loss_parallel: bool = False,
) -> nn.Module:
    """Cut a model's layers over a mesh, in place.

    Every rank of the mesh calls it, with equal weights and arguments: each rank keeps its parts of its own weights, and
    nothing moves. Call it before ``fully_shard``, whose mesh must be a slice of the same mesh as this one (one
    ``DeviceMesh.from_group`` with both dimensions; torch refuses meshes made apart). Weights on the meta device stay
    there. Attributes of attention modules that count heads (``num_heads``, ``num_key_value_heads`` and the like) become
    those of a rank.

    In the forward pass every rank of the mesh gets the same tokens. With ``sequence_parallel`` their number must be a
    multiple of the mesh's size, which the embedding checks; a ``forward`` that takes ``positions`` or ``position_ids``
    gets those of the whole sequence where a call leaves them out. A model that makes masks from the length of its
    embedded tokens needs ``sequence_parallel=False``.

    :param model: The model, not yet spread.
    :param mesh: A mesh of one dimension.
    :param plan: Styles by name of a module or pattern (``fnmatch``, such as ``layers.*.mlp.up_proj``) in place of
        :func:`plan_for`; of several that match a module the last one counts. All parameters need a style.
    :param sequence_parallel: As for :func:`plan_for`; only without a plan.
    :param loss_parallel: As for :func:`plan_for`; only without a plan.
    :return: The same model.
    :raises ConfigError: if the model, the mesh or the plan do not fit each other; nothing is changed then.
    """
    check_mesh(mesh, "tensor")
    if spread := [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]:
        raise ConfigError(f"{shorten(spread)}: the model is spread already; cut it once, before fully_shard")
    if plan is None:
        chosen = plan_for(model, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    else:
        chosen = _resolve(model, plan)
    _check_sizes(model, chosen, mesh.size())
    heads = _check_heads(model, chosen, mesh.size())
    tied = _tied(model, chosen)
    for name, style in chosen.items():
        layer = model.get_submodule(name)
        # src_data_rank=None: each rank cuts its own weights, and nothing is broadcast.
        parallelize_module(layer, mesh, style, src_data_rank=None)
        cuts_sequence = isinstance(style, RowwiseParallel) and style.output_layouts == (Shard(1),)
        if cuts_sequence and isinstance(layer, nn.Embedding):
            _keep_whole_sequence(model, layer, mesh.size())
    for (first, first_name), *others in tied:  # they were cut apart, alike: one parameter again
        for owner, name in others:
            parameter = getattr(model.get_submodule(first), first_name)
            model.get_submodule(owner).register_parameter(name, parameter)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor), "every parameter has a style, and styles make DTensors"
        if parameter.requires_grad and all(placement.is_replicate() for placement in parameter.placements):
            # Each rank has used its replica on a part of the activations: the gradient is the sum over the mesh.
            parameter.register_hook(lambda grad: grad.redistribute(placements=[Replicate()]))  # type: ignore[no-untyped-call]
    for attention, attribute, count in heads:
        setattr(attention, attribute, count)
    return model


def _check_pairs(names: Mapping[str, nn.Module], plan: Mapping[str, ParallelStyle]) -> None:
    """Raise unless each module that cuts outputs also has the layer that puts them together."""
    columns = {_parent(name) for name in plan if _leaf(name) in COLUMNS}
    rows = {_parent(name) for name in plan if _leaf(name) in ROWS}
    if not columns:
        raise ConfigError(
            f"no layers of a transformer among {shorten(sorted({_leaf(name) for name in names}))}; tensor "
            f"parallelism knows {', '.join(COLUMNS)}; give a plan of your own"
        )
    for parent in sorted(columns ^ rows):
        known, missing = (COLUMNS, ROWS) if parent in columns else (ROWS, COLUMNS)
        alone = shorten([name for name in plan if _parent(name) == parent and _leaf(name) in known])
        raise ConfigError(f"{alone} without one of {', '.join(missing)} in {parent or 'the model'}; give your own plan")


def _resolve(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    names = [name for name, _ in model.named_modules()]
    chosen: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        if not isinstance(pattern, str) or not isinstance(style, ParallelStyle):
            raise ConfigError(f"the plan must map names to torch's parallel styles, got {pattern!r}: {style!r}")
        matched = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not matched:
            near = closest(pattern, names, cutoff=0.0)
            raise ConfigError(f"the plan's {pattern!r} matches no module of the model; the nearest is {near!r}")
        chosen.update(dict.fromkeys(matched, style))
    _check_covers(model, chosen, "the plan does not say how these parameters lie; give")
    return {name: chosen[name] for name in names if name in chosen}


def _check_sizes(model: nn.Module, plan: Mapping[str, ParallelStyle], size: int) -> None:
    for name, style in plan.items():
        module = model.get_submodule(name)
        if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
            continue
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise ConfigError(
                f"{name} is a {type(module).__name__}, but {type(style).__name__} cuts nn.Linear and nn.Embedding "
                "only; use such a layer, or give a plan of your own"
            )
        dim = _cut_dim(module, style)
        length = module.weight.shape[dim]
        if length % size:
            raise ConfigError(
                f"{name}.weight {tuple(module.weight.shape)} is cut along dimension {dim}, but {length} does not "
                f"divide by the {size} ranks of the mesh; give a tensor-parallel size that does, or pad the layer"
            )


def _check_heads(model: nn.Module, plan: Mapping[str, ParallelStyle], size: int) -> list[tuple[nn.Module, str, int]]:
    """Raise unless every rank gets whole heads; return the attributes that count them, with a rank's count."""
    changes: list[tuple[nn.Module, str, int]] = []
    for name, style in plan.items():
        if _leaf(name) not in QUERIES or not isinstance(style, ColwiseParallel):
            continue
        attention = model.get_submodule(_parent(name))
        width = _head_width(model, name)
        for other, layer in attention.named_children():
            if other in QUERIES + KEYS and isinstance(layer, nn.Linear):
                count, rest = divmod(layer.out_features, width)
                if rest or count % size:
                    raise ConfigError(
                        f"{_join(_parent(name), other)} has {layer.out_features / width:g} heads of width {width}, "
                        f"which do not divide by the {size} ranks of the mesh; give a tensor-parallel size that "
                        "divides the heads"
                    )
                # Attention splits its projections by these counts, and a rank's projections have fewer heads.
                attributes = QUERY_HEADS if other in QUERIES else KEY_HEADS
                changes += [(attention, key, count // size) for key in attributes if vars(attention).get(key) == count]
            if other in HEAD_NORMS and any(weight.numel() != width for weight in layer.parameters()):
                raise ConfigError(f"{_join(_parent(name), other)} spans all heads, not a rank's; give your own plan")
    return changes


def _head_width(model: nn.Module, query: str) -> int:
    """Return the width of a head that the attention module, its configuration or the model's has."""
    attention, layer = model.get_submodule(_parent(query)), model.get_submodule(query)
    assert isinstance(layer, nn.Linear), "queries that are cut by columns are linear"
    sources = [attention, *(getattr(owner, "config", None) for owner in (attention, model))]
    width, heads = _count(sources, HEAD_WIDTHS), _count(sources, QUERY_HEADS)
    if width is None and heads is not None:
        width = layer.out_features // heads
    if not width or layer.out_features % width:
        raise ConfigError(
            f"{query} has {layer.out_features} outputs, but the width of its heads is not known or does not divide "
            f"them; set one of {', '.join(HEAD_WIDTHS + QUERY_HEADS)} on {_parent(query) or 'the model'}"
        )
    return width


def _count(sources: list[Any], names: tuple[str, ...]) -> int | None:
    values = (getattr(source, name, None) for source in sources for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _tied(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> list[list[tuple[str, str]]]:
    """Return the places (module, name) of each parameter that has several, which the plan must cut alike."""
    places = group(
        (id(parameter), (owner, name))
        for owner, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    )
    tied = [shared for shared in places.values() if len(shared) > 1]
    for shared in tied:
        cuts = {}
        for owner, name in shared:
            style, module = plan[owner], model.get_submodule(owner)
            is_cut = isinstance(style, (ColwiseParallel, RowwiseParallel))
            cuts[_join(owner, name)] = f"along dimension {_cut_dim(module, style)}" if is_cut else type(style).__name__
        if len(set(cuts.values())) > 1:
            listed = ", ".join(f"{name} ({cut})" for name, cut in cuts.items())
            raise ConfigError(f"{listed} are one tied parameter, but the plan cuts it differently; cut both alike")
    return tied


def _keep_whole_sequence(model: nn.Module, embedding: nn.Module, size: int) -> None:
    """Check the length of sequences, and count positions from that rather than from the part behind the embedding."""

    def check(_: nn.Module, inputs: tuple[Any, ...]) -> None:  # raises on all ranks, which have the same tokens
        if inputs and inputs[0].shape[-1] % size:
            raise ConfigError(
                f"a sequence of {inputs[0].shape[-1]} tokens does not divide by the {size} ranks of the "
                "tensor-parallel mesh; pad it, or give sequence_parallel=False"
            )

    def positions_of(first: torch.Tensor) -> torch.Tensor | None:
        return None if first.is_floating_point() else torch.arange(first.shape[-1], device=first.device)

    embedding.register_forward_pre_hook(check)
    name = find_positions(model)
    if name is not None:
        fill_positions(model, name, positions_of, is_first=False)  # a part of the sequence is numbered before


def _check_covers(model: nn.Module, plan: Mapping[str, ParallelStyle], problem: str) -> None:
    holders = {name for name in plan if not isinstance(plan[name], GatheredInput)}
    uncovered = [
        _join(owner, name)
        for owner, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if owner not in holders
    ]
    if uncovered:
        names = shorten(uncovered)
        raise ConfigError(f"{names}: {problem} Replicated() for layers that each rank computes whole")


def _cut_dim(module: nn.Module, style: ParallelStyle) -> int:
    """Return the dimension of the weight that a style cuts: a Linear's weight is (out, in)."""
    return int(isinstance(style, ColwiseParallel) == isinstance(module, nn.Embedding))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _join(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


@dataclass(eq=False, kw_only=True)
class Replicated(ParallelStyle):
    """Let every rank hold a module's whole weights, as DTensors, and compute with them on what it has.

    Nothing moves in the forward pass. Unlike torch's ``SequenceParallel`` it takes weights of any values and leaves
    frozen ones frozen, and what goes in and comes out are plain tensors.
    """

    layout: Placement = field(default_factory=Replicate)
    output_layout: Placement | None = None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            replica = distribute_tensor(parameter, device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(replica, parameter.requires_grad))
        module.register_forward_pre_hook(partial(_take, device_mesh, self.layout, self.layout), with_kwargs=True)
        module.register_forward_hook(self._to_local)
        return module

    def _to_local(self, module: nn.Module, inputs: Any, output: DTensor) -> torch.Tensor:
        if self.output_layout is not None:
            output = output.redistribute(placements=[self.output_layout])
        return output.to_local()


@dataclass(eq=False, kw_only=True)
class GatheredInput(ParallelStyle):
    """Make a module's first input whole once for all projections that read it, and reduce its gradient once.

    One all-gather forward and one reduce-scatter backward for ``Shard(1)``; one all-reduce backward for
    ``Replicate()``. torch's ``PrepareModuleInput`` has to know all arguments of the call.
    """

    layout: Placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_take, device_mesh, self.layout, Replicate()), with_kwargs=True)
        return module


def _take(
    mesh: DeviceMesh, layout: Placement, target: Placement, module: nn.Module, args: tuple[Any, ...], kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change the first tensor of a call from its layout into the wanted one, as a DTensor."""
    values: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    floating = [key for key, value in values.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    tensors = floating or [key for key, value in values.items() if isinstance(value, torch.Tensor)]
    if not tensors:
        raise ConfigError(f"{type(module).__name__} was called without a tensor, but its plan says how one lies")
    value = values[tensors[0]]
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, [layout], run_check=False)
    values[tensors[0]] = value.redistribute(placements=[target])
    return tuple(values[index] for index in range(len(args))), {key: values[key] for key in kwargs}
