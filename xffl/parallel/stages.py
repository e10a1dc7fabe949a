"""The stages of a pipeline: which part of a model each of them keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from xffl.checks import integer
from xffl.errors import ConfigError

__all__ = ["Skip", "split_model"]

Container = nn.ModuleList | nn.ModuleDict | nn.Sequential


class Skip(nn.Module):
    """Stand where a part of the model is on another stage: the hidden state goes on unchanged."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        r"""Return the first argument.

        :param hidden: What the absent part would have changed.
        :param \*args: Ignored.
        :param \**kwargs: Ignored.
        :return: ``hidden``.
        :raises ConfigError: if it is not a hidden state, so that leaving the part out would mean something else.
        """
        if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point():
            what = f"{hidden.dtype} values" if isinstance(hidden, torch.Tensor) else f"a {type(hidden).__name__}"
            raise ConfigError(
                f"a part of the model that lies on another stage was called with {what} instead of the hidden state "
                "(learned positions beside the tokens?); such a model needs a forward of its own for stages"
            )
        return hidden


def split_model(
    model: nn.Module,
    stage: int,
    stages: int,
    *,
    cuts: Sequence[int] | None = None,
    layers: str | None = None,
    first: Sequence[str] | None = None,
    last: Sequence[str] | None = None,
) -> nn.Module:
    """Keep one stage's part of a model of stacked layers, with the names of the whole model.

    Local; nothing moves. The model is changed in place, on any device (meta too): absent parts become a :class:`Skip`,
    entries of a ``ModuleDict`` are taken out. So the model's own forward runs on every stage, if it calls its layers
    one after the other as ``hidden = layer(hidden, ...)``, with nothing else in the loop that changes the hidden state,
    and its other parts as ``part(hidden)``. What the first stage takes as tokens, others take as the hidden state, in
    the same positional arguments; all but the last return it.

    The layers are the list (``ModuleList``, ``ModuleDict`` or ``Sequential``) of modules of one class that holds the
    most elements. Around it, on the way from the root to the list, modules registered before it belong to the first
    stage and those after it to the last; a module that has buffers but no parameters (rotary angles) stays everywhere.

    :param model: The whole model.
    :param stage: Which stage to keep, from 0.
    :param stages: Number of stages.
    :param cuts: The index of the first layer of each stage but the first. By default layers are spread evenly, the
        embedding and the head counted as one layer each.
    :param layers: Name of the list of layers, where it cannot be found or is not the one meant.
    :param first: Names of the modules of the first stage, instead of those registered before the layers.
    :param last: Names of the modules of the last stage, instead of those registered after the layers. A module without
        parameters that neither names stays everywhere.
    :return: The same object.
    :raises ConfigError: if the numbers do not fit the layers, no list of layers is found, or a parameter would lie on
        several stages (tied embeddings, or a parameter beside the layers that no module of a stage owns).
    """
    name, container = _find_layers(model, layers)
    keys = [key for key, _ in container.named_children()]
    bounds = _bounds(len(keys), stage, stages, cuts)
    homes = {f"{name}.{key}": sum(bound <= index for bound in bounds) for index, key in enumerate(keys)}
    homes |= _surroundings(model, name, first, last, stages)
    _check_homes(model, homes, stages)
    for part, home in homes.items():
        if home != stage:
            parent, _, leaf = part.rpartition(".")
            holder = model.get_submodule(parent)
            if holder is container and isinstance(container, nn.ModuleDict):
                del container[leaf]
            else:
                holder.set_submodule(leaf, Skip())
    return model


def _find_layers(model: nn.Module, name: str | None) -> tuple[str, Container]:
    """Return the list of layers and its name."""
    if name is not None:
        found = dict(model.named_modules()).get(name)
        if not name or not isinstance(found, Container) or not len(found):
            raise ConfigError(
                f"layers={name!r} is {type(found).__name__}; name a ModuleList, ModuleDict or Sequential of layers"
            )
        return name, found
    sizes: dict[str, int] = {}
    for place, module in model.named_modules():
        if place and isinstance(module, Container) and len({type(child) for child in module.children()}) == 1:
            sizes[place] = sum(parameter.numel() for parameter in module.parameters())
    best = [place for place, size in sizes.items() if size == max(sizes.values()) > 0]
    if len(best) != 1:
        raise ConfigError(
            f"{type(model).__name__} has {len(best)} largest lists of modules of one class"
            f"{': ' if best else ''}{', '.join(best)}; name the list of layers with layers="
        )
    container = model.get_submodule(best[0])
    assert isinstance(container, Container)
    return best[0], container


def _bounds(count: int, stage: int, stages: int, cuts: Sequence[int] | None) -> list[int]:
    """Return where the stages but the first begin."""
    if stages < 1 or not 0 <= stage < stages:
        raise ConfigError(f"stage {stage} of {stages} does not exist; give 0 <= stage < stages")
    if stages > count:
        raise ConfigError(f"{stages} stages cannot share {count} layers; give at most {count} stages")
    if cuts is not None:
        hint = f"give {stages - 1} growing indices between 1 and {count - 1}"
        cuts = [integer("an index of cuts", cut, None, hint=hint) for cut in cuts]
        bounds = [0, *cuts, count]
        if len(cuts) != stages - 1 or any(left >= right for left, right in pairwise(bounds)):
            raise ConfigError(f"cuts={cuts} do not make {stages} stages of {count} layers; {hint}")
        return cuts
    counts = [1] * stages
    loads = [1 + (index == 0) + (index == stages - 1) for index in range(stages)]
    for _ in range(count - stages):
        lightest = loads.index(min(loads))
        counts[lightest] += 1
        loads[lightest] += 1
    return [sum(counts[: index + 1]) for index in range(stages - 1)]


def _surroundings(
    model: nn.Module, name: str, first: Sequence[str] | None, last: Sequence[str] | None, stages: int
) -> dict[str, int]:
    """Return the stage of each module beside the layers, by name."""
    before: list[str] = []
    after: list[str] = []
    path = name.split(".")
    for depth, stop in enumerate(path):
        holder = model.get_submodule(".".join(path[:depth]))
        side = before
        for leaf, module in holder.named_children():
            if leaf == stop:
                side = after
            elif any(True for _ in module.parameters()) or not any(True for _ in module.buffers()):
                side.append(".".join([*path[:depth], leaf]))
    homes: dict[str, int] = {}
    known = dict(model.named_modules(remove_duplicate=False))
    for given, found, home in ((first, before, 0), (last, after, stages - 1)):
        for part in found if given is None else given:
            if part not in known or f"{name}.".startswith(f"{part}.") or part.startswith(f"{name}."):
                raise ConfigError(f"{part!r} is no module beside {name!r}; give names of modules outside the layers")
            if homes.setdefault(part, home) != home:
                raise ConfigError(f"{part!r} is on the first and on the last stage; name it in first= or in last= only")
    return homes


def _check_homes(model: nn.Module, homes: Mapping[str, int], stages: int) -> None:
    """Refuse a parameter that would lie on several stages, which nothing keeps equal."""
    seen: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False) if stages > 1 else ():
        home = next((stage for part, stage in homes.items() if name.startswith(f"{part}.")), None)
        if home is None:
            raise ConfigError(
                f"parameter {name!r} belongs to no stage; put it into a module, or name its module in first= or last="
            )
        other, where = seen.setdefault(id(parameter), (name, home))
        if where != home:
            raise ConfigError(
                f"{other!r} and {name!r} are one tied parameter, but lie on stages {where} and {home}; untie them "
                "(tie_word_embeddings=False), or use no pipeline"
            )
