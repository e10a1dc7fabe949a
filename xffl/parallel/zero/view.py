"""View of a model that ZeRO has cut: the master weights that a rank holds, by name, for rounds and checkpoints.

DeepSpeed's optimizer keeps its own copy of the weights in fp32 (the *masters*), cut over the ranks of a cell: with
stages 1 and 2 the parameters of a group as one long row, with stage 3 each parameter by itself. The masters are what
training changes, the model's weights are rounded copies of them; so a round averages the masters, and writes the copies
anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from xffl.distributed.values.sharding import local_tensor
from xffl.errors import ConfigError
from xffl.parallel.zero.mark import MARK

__all__ = ["Masters"]


@dataclass(frozen=True)
class Fragment:
    """This rank's part of a parameter: elements of a row of the optimizer from an offset, from a start in the whole."""

    row: int
    offset: int
    start: int
    numel: int
    total: int

    def of(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the part, in the memory of its row."""
        return rows[self.row].detach()[self.offset : self.offset + self.numel]


class Masters:
    """The masters of an engine, and its optimizer's state, as tensors of whole parameters' names.

    The :attr:`view` is a model of the same structure whose parameters are rows cut over the ranks of the cell (a
    :class:`DTensor` of one dimension each), in memory of their own: 4 bytes for each element that the rank holds.
    Buffers are the model's own; so are parameters that are not trained.
    """

    def __init__(self, engine: Any, model: nn.Module, mesh: DeviceMesh) -> None:
        self._engine = engine
        self._model = model
        self._mesh = mesh
        self._stage = int(engine.zero_optimization_stage())
        self._device = torch.device(engine.device)
        self._place = mesh.get_local_rank()
        self._size = mesh.size()
        self._steps = -1
        zero = engine.optimizer
        groups = zero.fp16_groups if self._stage == 3 else zero.bit16_groups
        self._rows: list[torch.Tensor] = list(
            zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups
        )
        fragments = dict(self._fragments(groups))
        self._fragment = {name: fragments[p] for name, p in model.named_parameters() if p in fragments}
        self._parameter = {name: p for name, p in model.named_parameters() if p in fragments}

    @cached_property
    def _shard(self) -> dict[str, nn.Parameter]:
        """The view's parameters, by name."""
        return {name: self._empty(name) for name in self._fragment}

    @cached_property
    def view(self) -> nn.Module:
        """The model of cut rows, made at the first use; it holds what :meth:`read` has taken."""
        # Modules of the same types and names, with the cut rows in the place of the parameters.
        cut: dict[nn.Parameter, nn.Parameter] = {p: self._shard[name] for name, p in self._parameter.items()}
        twins: dict[nn.Module, nn.Module] = {}
        for module in self._model.modules():
            twin = twins[module] = type(module).__new__(type(module))
            twin.__dict__.update(module.__dict__)
        for module, twin in twins.items():
            parameters = {
                leaf: None if parameter is None else self._row_of(parameter, cut)
                for leaf, parameter in module._parameters.items()
            }
            children = {name: None if child is None else twins[child] for name, child in module._modules.items()}
            twin.__dict__.update(_parameters=parameters, _modules=children)
            twin.__dict__.pop(MARK, None)
        return twins[self._model]

    def _row_of(self, parameter: nn.Parameter, cut: dict[nn.Parameter, nn.Parameter]) -> nn.Parameter:
        """Return a parameter's row; one that is not trained shares its memory with the model."""
        if parameter not in cut:
            if self._stage < 3:
                cut[parameter] = parameter
            else:
                start, last = self._chunk(numel := self._numel(parameter))
                own = parameter.ds_tensor.data[: last - start]  # type: ignore[attr-defined]
                cut[parameter] = nn.Parameter(self._cut(own, numel), requires_grad=False)
        return cut[parameter]

    def _fragments(self, groups: Sequence[Sequence[nn.Parameter]]) -> Iterator[tuple[nn.Parameter, Fragment]]:
        """Find where this rank's rows hold each parameter."""
        for row, parameters in enumerate(groups):
            offset, length = 0, self._rows[row].numel()
            first = 0 if self._stage == 3 else self._place * length
            for parameter in parameters:
                numel = self._numel(parameter)
                if self._stage == 3:
                    start, last = self._chunk(numel)
                    yield parameter, Fragment(row, offset=offset, start=start, numel=last - start, total=numel)
                    offset += -(-numel // self._size)
                    continue
                start, last = (min(max(edge - offset, 0), numel) for edge in (first, first + length))
                yield (
                    parameter,
                    Fragment(row, offset=max(offset + start - first, 0), start=start, numel=last - start, total=numel),
                )
                offset += numel

    def _numel(self, parameter: nn.Parameter) -> int:
        return int(parameter.ds_numel) if self._stage == 3 else parameter.numel()  # type: ignore[attr-defined]

    def _chunk(self, numel: int) -> tuple[int, int]:
        """Return the elements of a row that a DTensor gives this rank."""
        length = -(-numel // self._size)
        return min(self._place * length, numel), min((self._place + 1) * length, numel)

    def _empty(self, name: str, dtype: torch.dtype | None = None) -> nn.Parameter:
        numel = self._fragment[name].total
        start, last = self._chunk(numel)
        local = torch.zeros(last - start, dtype=dtype or self._rows[0].dtype, device=self._device)
        return nn.Parameter(self._cut(local, numel), requires_grad=True)

    def _cut(self, local: torch.Tensor, numel: int) -> DTensor:
        shape = torch.Size((numel,))
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))

    # Between rows and cut rows ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _collect(self, name: str, rows: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Copy a parameter's part of the ranks' rows into this rank's shard; with stages 1 and 2 over the cell."""
        fragment = self._fragment[name]
        own = fragment.of(rows)
        if self._stage == 3:
            into.copy_(own)
            return
        whole = torch.zeros(fragment.total, dtype=own.dtype, device=self._device)
        whole[fragment.start : fragment.start + fragment.numel] = own.to(self._device)
        dist.all_reduce(whole.view(torch.uint8), group=self._mesh.get_group())  # adding zeros keeps every bit
        into.copy_(whole[slice(*self._chunk(fragment.total))])

    @torch.no_grad()
    def _spread(self, name: str, shard: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Copy shards into the ranks' rows; with stages 1 and 2 over the cell, and the whole is returned."""
        fragment = self._fragment[name]
        own = fragment.of(rows)
        if self._stage == 3:
            own.copy_(shard)
            return None
        whole = self._cut(shard, fragment.total).full_tensor()
        own.copy_(whole[fragment.start : fragment.start + fragment.numel])
        return whole

    def check(self) -> None:
        """Raise where the model holds other parameters than those whose masters the engine steps; local."""
        now = dict(self._model.named_parameters())
        if other := [name for name, parameter in self._parameter.items() if now.get(name) is not parameter]:
            raise ConfigError(
                f"parameter {other[0]!r} was replaced by another object since wrap_optimizer, so ZeRO goes on training "
                "the old one; load with assign=False, or replace parameters before wrap_model"
            )

    def read(self) -> None:
        """Take the masters as they are into the view; collective over the cell with stages 1 and 2."""
        for name, shard in self._shard.items():
            self._collect(name, self._rows, local_tensor(shard).detach())
        self._steps = self._engine.global_steps

    def read_again(self) -> None:
        """Do what :meth:`read` does, if there was a step since."""
        if self._steps != self._engine.global_steps:
            self.read()

    @torch.no_grad()
    def write(self) -> None:
        """Make the view's values the masters, and the weights copies of them; collective like :meth:`read`."""
        if self._stage == 3:  # frees what is gathered
            self._engine.optimizer.empty_partition_cache()
        for name, shard in self._shard.items():
            parameter = self._parameter[name]
            local = local_tensor(shard).detach()
            whole = self._spread(name, local, self._rows)
            if whole is not None:
                parameter.data.copy_(whole.view_as(parameter))
            else:
                parameter.ds_tensor.data[: len(local)].copy_(local)  # type: ignore[attr-defined]

    # The optimizer's state --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, by parameter and cut like the view, and its options; collective like read."""
        inner = self._engine.optimizer.optimizer
        states: list[dict[str, Any]] = [dict(inner.state.get(row, {})) for row in self._rows]
        cut: dict[str, dict[str, torch.Tensor]] = {}
        for name, fragment in self._fragment.items():
            cut[name] = {}
            for key, value in states[fragment.row].items():
                if _is_row(value, self._rows[fragment.row]):
                    shard = self._empty(name, value.dtype).data
                    self._collect(name, [state.get(key, value) for state in states], local_tensor(shard).detach())
                    cut[name][key] = shard
        others = [
            {key: value for key, value in state.items() if not _is_row(value, row)}
            for state, row in zip(states, self._rows, strict=True)
        ]
        options = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
        # Rows are the groups with stages 1 and 2, and parts of groups with stage 3, where each has its own numbers.
        by_name = {name: others[fragment.row] for name, fragment in self._fragment.items()}
        scale = self._engine.optimizer.loss_scaler
        return {"rows": cut, "others": by_name, "options": options, "loss_scale": dict(vars(scale))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned, of any number of ranks; collective like it."""
        inner = self._engine.optimizer.optimizer
        for name, fragment in self._fragment.items():
            own = inner.state[self._rows[fragment.row]]
            for key, value in state["rows"][name].items():
                self._spread(name, local_tensor(value), [inner.state[row].get(key, own[key]) for row in self._rows])
            for key, value in state["others"][name].items():
                own[key] = value.clone() if isinstance(value, torch.Tensor) else value
        for group, options in zip(inner.param_groups, state["options"], strict=True):
            group.update(options)
        vars(self._engine.optimizer.loss_scaler).update(state["loss_scale"])

    def fill_state(self) -> None:
        """Let an optimizer that has not stepped make its state, with steps that change nothing; local."""
        inner = self._engine.optimizer.optimizer
        if any(inner.state.get(row) for row in self._rows):
            return
        params = [group["params"] for group in inner.param_groups]
        values = [row.detach().clone() for row in self._rows]
        grads = [row.grad for row in self._rows]
        for row in self._rows:
            row.grad = torch.zeros_like(row)
        # DeepSpeed's stage 3 hands the optimizer a row only while it steps it, so all rows are put into their groups
        # for this step. With weight decay it moves them without a gradient, too: their values are copied back.
        for group in inner.param_groups:
            group["params"] = []
        for row_number, row in enumerate(self._rows):
            number = self._engine.optimizer.sub_group_to_group_id[row_number] if self._stage == 3 else row_number
            inner.param_groups[number]["params"].append(row)
        inner.step()
        for row, value, grad in zip(self._rows, values, grads, strict=True):
            row.data.copy_(value)
            row.grad = grad
        for group, members in zip(inner.param_groups, params, strict=True):
            group["params"] = members


def _is_row(value: object, row: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == row.shape and value.dim() == 1
