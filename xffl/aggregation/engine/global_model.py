"""The global model in fp32, and the server optimizer that updates it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from xffl.aggregation.algorithms.server import asked_of, load_options, load_schedule
from xffl.aggregation.engine.buffers import Layout
from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.engine.tensors import TensorInfo
from xffl.aggregation.engine.transfers import Bucket, GroupTransfer
from xffl.aggregation.mean import piece_length, wide_type
from xffl.aggregation.options import Options
from xffl.checks import shown
from xffl.distributed.consistency import find_unequal_cells, sum_of_bits
from xffl.distributed.sharding import local_tensor, reshard
from xffl.errors import CheckpointError, ConfigError, StateError
from xffl.reading import Fields

__all__ = ["GlobalModel", "check_saved", "check_start", "digest_of"]


VECTORS = 64
"""A multiple of the elements that any CPU computes with at a time."""


class _Held(NamedTuple):
    """What is kept of a fragment, by the number of the transfer."""

    fragment: int
    values: dict[int, torch.Tensor]
    states: dict[int, dict[str, Any]]  # what the optimizer keeps for them
    options: dict[str, Any]  # of the optimizer


class GlobalModel:
    """The parameters that training changes, as all cells last agreed on them, in fp32 (fp64 for fp64).

    A server optimizer sees, for each part of the model that is exchanged in turn, one flat tensor for each group of the
    rank; a group has the same elements in the same order on all ranks that hold it, so they all take the same step.
    Each part has its own optimizer and schedule.
    """

    def __init__(
        self,
        transfers: Sequence[GroupTransfer],
        layout: Layout,
        options: Options,
        device: torch.device,
    ) -> None:
        server = options.server
        self._transfers = [transfer for transfer in transfers if transfer.group.is_stepped]
        self.layout = layout
        self.device = device
        self._kept_on = device if server is None or server.device is None else torch.device(server.device)
        self._values = {
            transfer.number: torch.empty(
                transfer.group.numel,
                dtype=wide_type(transfer.dtype),
                device=self._kept_on,
            )
            for transfer in self._transfers
        }
        self._sizes = {number: len(values) for number, values in self._values.items()}
        self._numbers = () if server is None else server.number_names
        self._is_known = True
        self.has_optimizer = server is not None  # also on a rank that holds no element
        self._optimizers: dict[int, Optimizer] = {}
        self._schedules: dict[int, LRScheduler] = {}
        self._asked: dict[int, dict[str, str]] = {}
        self._ended: dict[int, str] = {}
        """Why the schedule of a fragment goes no further."""
        for fragment in sorted({transfer.group.fragment for transfer in self._transfers}) if server is not None else ():
            assert server is not None
            optimizer = server.make([self._values[transfer.number] for transfer in self._of(fragment)])
            schedule = server.make_schedule(optimizer)
            self._optimizers[fragment] = optimizer
            self._schedules |= {} if schedule is None else {fragment: schedule}
            self._asked[fragment] = asked_of(optimizer, schedule)

    @property
    def fragments(self) -> Set[int]:
        """The parts of the model that have a server optimizer here."""
        return self._optimizers.keys()

    @torch.no_grad()
    def reset_from_model(self) -> None:
        """Take the model as it is for what all cells agree on; local."""
        self.layout.look_up()
        for transfer in self._transfers:
            for bucket in transfer.buckets:
                buffer = torch.empty(bucket.stop - bucket.start, dtype=transfer.dtype, device=self.device)
                self.layout.pack(bucket, buffer)
                self._values[transfer.number][bucket.start : bucket.stop].copy_(buffer)

    @torch.no_grad()
    def write(self) -> None:
        """Write what all cells agree on into the model; local."""
        self.layout.look_up()
        for transfer in self._transfers:
            for bucket in transfer.buckets:
                self.layout.unpack(bucket, self.written(transfer, bucket))

    def forget(self) -> None:
        """Note that ranks may hold different states: no round takes place until one has been loaded; local."""
        self._is_known = False

    def check(self, fragment: int) -> None:
        """Raise where a round cannot go on from this state; local."""
        if not self._is_known:
            raise StateError(
                "the last agreed model and the server optimizer may differ between ranks since a round tore the model, "
                "or a state could not be loaded; load the aggregator's state of the same checkpoint on all ranks, or "
                "make a new Aggregator"
            )
        if fragment in self._ended:
            raise StateError(
                f"the schedule of the server's learning rate goes no further ({self._ended[fragment]}); make a new "
                "Aggregator with a longer one"
            )

    def written(self, transfer: GroupTransfer, bucket: Bucket) -> torch.Tensor:
        """Return a bucket as it was written into the model: in its data type, where the backend communicates from."""
        return self._values[transfer.number][bucket.start : bucket.stop].to(device=self.device, dtype=transfer.dtype)

    def squared_distance(self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor) -> torch.Tensor:
        """Return the squared L2 distance of a bucket's values from the agreed ones, a number in fp64; local."""
        total = torch.zeros((), dtype=torch.float64, device=values.device)
        agreed = self.written(transfer, bucket)
        length = piece_length(values.device)
        for mine, theirs in zip(torch.split(values, length), torch.split(agreed, length), strict=True):
            step = torch.sub(mine.double(), theirs.double())
            total += step.dot(step)
        return total

    @torch.inference_mode(False)  # what a server's optimizer makes here outlives the round
    @torch.no_grad()
    def step(
        self, fragment: int, means: Mapping[int, torch.Tensor], scale: float
    ) -> Iterator[tuple[GroupTransfer, Bucket, torch.Tensor]]:
        """Go on from the agreed model to the next, and yield each bucket with its new values, as they are written.

        Local, the same on all ranks that hold the same elements. It uses the means' memory, and counts once all buckets
        were taken.
        """
        held = self._held(fragment)
        new = _Held(fragment, held.values, {number: dict(state) for number, state in held.states.items()}, {})
        yield from self._advance(means, scale, new)
        self._put(new)
        self._step_schedule(fragment)

    def _held(self, fragment: int) -> _Held:
        """Return what is kept of a fragment."""
        optimizer = self._optimizers.get(fragment)
        kept = {transfer.number: self._values[transfer.number] for transfer in self._of(fragment)}
        states: dict[torch.Tensor, dict[str, Any]] = {} if optimizer is None else optimizer.state
        return _Held(
            fragment,
            {number: values.data for number, values in kept.items()},
            {number: states[values] for number, values in kept.items() if values in states},
            {} if optimizer is None else _options_of(optimizer),
        )

    def _put(self, step: _Held) -> None:
        """Keep other values and states of a fragment from now on."""
        for number, values in step.values.items():
            self._values[number].data = values
            self._values[number].grad = None
        if (optimizer := self._optimizers.get(step.fragment)) is not None:
            optimizer.state.clear()
            optimizer.state.update({self._values[number]: state for number, state in step.states.items()})
            optimizer.param_groups[0].update(step.options)

    def _advance(
        self, means: Mapping[int, torch.Tensor], scale: float, new: _Held
    ) -> Iterator[tuple[GroupTransfer, Bucket, torch.Tensor]]:
        """Step what is kept of a fragment into the memory of ``new``, bucket by bucket; yield the new values.

        They are in the type of the means, whose memory is used. All of a bucket's step is made while it lies in the
        processor's cache: the gradient, what the optimizer keeps, the values. The optimizer is elementwise, so it does
        not matter that it steps once for each.
        """
        old, optimizer = self._held(new.fragment), self._optimizers.get(new.fragment)
        try:
            for transfer in self._of(new.fragment):
                number = transfer.number
                for bucket in transfer.buckets:
                    mean = means[number][bucket.start : bucket.stop]
                    values = new.values[number][bucket.start : bucket.stop]
                    is_mean = optimizer is None and scale == 1.0
                    if is_mean:
                        values.copy_(mean)
                    elif optimizer is None:
                        values.sub_(self._pseudo_gradient(values, mean, scale))
                    else:
                        gradient = self._pseudo_gradient(values, mean, scale)
                        self._step_piece(old, new, number, values, gradient, bucket.start)
                    is_alike = values.dtype == mean.dtype and values.device == mean.device
                    yield transfer, bucket, values if is_alike else mean if is_mean else mean.copy_(values)
            new.options.update({} if optimizer is None else _options_of(optimizer))
        finally:
            self._put(old)

    def _step_piece(
        self, old: _Held, new: _Held, number: int, values: torch.Tensor, gradient: torch.Tensor, start: int
    ) -> None:
        """Step values, which begin at an element of a transfer's tensor, and what the optimizer keeps for them."""
        optimizer, kept = self._optimizers[new.fragment], self._values[number]
        group, before, after = optimizer.param_groups[0], old.states.get(number, {}), new.states.setdefault(number, {})
        for cut, options in _cuts(optimizer, values):
            piece = slice(start + cut.start, start + cut.stop)
            kept.data, kept.grad = values[cut], gradient[cut]
            group.update({key: _copied(one) for key, one in old.options.items()} | options)
            optimizer.state.pop(kept, None)
            for key, value in before.items():
                if not self._is_of_elements(key, value, number):
                    optimizer.state[kept][key] = _copied(value)
                    continue
                if key not in after:
                    after[key] = self._room(number, value)
                optimizer.state[kept][key] = _moved(value, after[key], piece)
            optimizer.step()
            group.update({key: old.options[key] for key in options})
            kept.grad = None
            for key, value in optimizer.state.get(kept, {}).items():
                if not self._is_of_elements(key, value, number, len(kept)):
                    after[key] = value
                    continue
                if key not in after:
                    after[key] = self._room(number, value)
                if (part := after[key][piece]).data_ptr() != value.data_ptr():
                    part.copy_(value)

    def _room(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """Return memory for what the optimizer keeps for each element of a transfer, in the type of ``like``."""
        return like.new_empty(self._sizes[number])

    def _is_of_elements(self, name: str, value: object, number: int, numel: int | None = None) -> bool:
        """Tell whether the optimizer keeps a value for each element of a transfer, or of ``numel`` of its elements.

        Of one element the shape does not tell; the server's name for it does.
        """
        numel = self._sizes[number] if numel is None else numel
        is_alike = isinstance(value, torch.Tensor) and value.shape == (numel,)
        return is_alike and (numel != 1 or name not in self._numbers)

    def _step_schedule(self, fragment: int) -> None:
        if fragment in self._schedules:
            try:
                self._schedules[fragment].step()
            except Exception as ended:  # noqa: BLE001 - this round is agreed; the next one is told of it, on all ranks
                self._ended[fragment] = f"{type(ended).__name__}: {ended}"

    def _pseudo_gradient(self, kept: torch.Tensor, mean: torch.Tensor, scale: float) -> torch.Tensor:
        """Return ``scale * (written - mean)``, in the mean's own memory where the type allows it.

        From what was written, so that what rounding to a narrow type has left out is not taken for a step.
        """
        new = mean.to(self._kept_on)
        out = new if new.dtype == kept.dtype else torch.empty_like(kept)
        torch.sub(kept.to(mean.dtype).to(kept.dtype), new.to(kept.dtype), out=out)
        return out.mul_(scale) if scale != 1.0 else out

    def _of(self, fragment: int) -> list[GroupTransfer]:
        return [transfer for transfer in self._transfers if transfer.group.fragment == fragment]

    def state_dict(self) -> dict[str, Any]:
        """Return the agreed model and the optimizers' states by the names of tensors, of what this rank holds."""
        state = self.plain_state()
        for flat, named in self.tables(state):
            named.update(self.by_name(flat))
        return state

    def plain_state(self) -> dict[str, Any]:
        """Return :meth:`state_dict` without the tensors that are cut over ranks."""
        optimizers: dict[int, dict[str, Any]] = {}
        for fragment, optimizer in self._optimizers.items():
            number = self._of(fragment)[0].number
            kept = optimizer.state.get(self._values[number], {})
            # What it keeps for each element, and not as a number for all.
            of_elements = {key for key, value in kept.items() if self._is_of_elements(key, value, number)}
            schedule = self._schedules.get(fragment)
            optimizers[fragment] = {
                "elements": {key: {} for key in sorted(of_elements)},
                "numbers": {key: _copied(value) for key, value in kept.items() if key not in of_elements},
                "options": _options_of(optimizer),
                "schedule": None if schedule is None else schedule.state_dict(),
                "ended": self._ended.get(fragment),
                "asked": dict(self._asked[fragment]),
            }
        return {"model": {}, "optimizers": optimizers}

    def tables(self, state: Mapping[str, Any]) -> Iterator[tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]]:
        """Yield the agreed model and what the optimizers of a state keep for each element: here, and in that state.

        In the order of all ranks; empty where this rank holds nothing of it.
        """
        yield self._values, state["model"]
        for fragment, saved in sorted(state["optimizers"].items()):
            for key, named in sorted(saved["elements"].items()):
                kept = self._optimizers[fragment].state if fragment in self._optimizers else {}
                yield {one.number: kept[self._values[one.number]][key] for one in self._of(fragment)}, named

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned on this rank; bucket sizes may have changed since."""
        if "owned" in state:
            raise CheckpointError(
                "the state of the server was saved in parts, each by the one rank that stepped it (server_step), and "
                "each rank steps all that it holds now; go on from the model alone (a checkpoint's reset)"
            )
        self.load_plain_state(state)
        self.forget()  # again, until all of it is here
        for flat, named in self.tables(state):
            self._from_names(named, flat)
        self._is_known = True

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_plain_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state without the tensors that are cut over ranks, and make memory for these; local."""
        if set(state["optimizers"]) != set(self._optimizers):
            raise CheckpointError(
                f"the state has server optimizers for fragments {sorted(state['optimizers'])} and this aggregator for "
                f"{sorted(self._optimizers)}; resume with the same server and fragments"
            )
        for fragment in self._optimizers:
            saved = state["optimizers"][fragment]
            check_saved(saved)
            self._check_asked(fragment, saved.get("asked", {"class": "unknown"}))
        self.forget()  # what follows may end halfway
        for fragment, optimizer in self._optimizers.items():
            saved = state["optimizers"][fragment]
            optimizer.state.clear()
            for values in (self._values[transfer.number] for transfer in self._of(fragment)):
                if saved["elements"] or saved["numbers"]:
                    numbers = {key: _copied(value) for key, value in saved["numbers"].items()}
                    optimizer.state[values] = {key: torch.empty_like(values) for key in saved["elements"]} | numbers
            load_options(optimizer, saved["options"])
            if fragment in self._schedules:
                load_schedule(self._schedules[fragment], saved["schedule"])
        ended = {fragment: state["optimizers"][fragment].get("ended") for fragment in self._optimizers}
        self._ended = {fragment: why for fragment, why in ended.items() if why is not None}
        self._is_known = True

    @torch.no_grad()
    def take_over(self, last: GlobalModel) -> None:
        """Go on from another global model of this rank, whose memory this one uses where both order it alike; local.

        The other one may go on as long as this one makes no step.
        """
        state = last.plain_state()
        if last.has_optimizer:  # else it is that of the first round, which is no step of a server
            self.load_plain_state(state)
        # Elements lie in the order of the buckets, which may be others where other cells have come.
        mine_at, theirs_at = (
            (model._kept_on, [(one.number, [bucket.pieces for bucket in one.buckets]) for one in model._transfers])
            for model in (self, last)
        )
        is_alike = mine_at == theirs_at
        for (mine, _), (theirs, _) in zip(self.tables(state), last.tables(state), strict=True):
            if is_alike:
                for number, values in mine.items():
                    values.data = theirs[number]
            else:
                self._from_names(last.by_name(theirs), mine)

    @torch.no_grad()
    def load_model(self, named: Mapping[str, torch.Tensor]) -> None:
        """Take over the last agreed model alone, what :meth:`state_dict` returned of it on this rank."""
        self._from_names(named, self._values)

    def _check_asked(self, fragment: int, saved: Mapping[str, str]) -> None:
        """Refuse the state of a server that was asked for otherwise; options that one torch lacks are left out."""
        asked = self._asked[fragment]
        others = sorted(key for key in asked.keys() & saved.keys() if asked[key] != saved[key])
        if others:
            there, here = (", ".join(f"{key}={one[key]}" for key in others) for one in (saved, asked))
            raise CheckpointError(
                f"the state is that of a server optimizer with {there}, and this aggregator's has {here}; resume with "
                "the same server, options and schedule, or leave the aggregator's state out (a checkpoint's reset)"
            )

    def by_name(self, flat: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Put flat tensors of whole groups together to the tensors that this rank holds."""
        named: dict[str, torch.Tensor] = {}
        for values, name, numel, part in self._pieces(flat):
            if name not in named:
                named[name] = torch.empty(numel, dtype=values.dtype, device="cpu")
            named[name][part].copy_(values)
        return named

    def _from_names(self, named: Mapping[str, torch.Tensor], flat: Mapping[int, torch.Tensor]) -> None:
        for values, name, numel, part in self._pieces(flat):
            if name not in named or named[name].numel() != numel:
                got = f"{named[name].numel()} elements" if name in named else "nothing"
                raise CheckpointError(
                    f"the state of the last agreed model holds {got} for tensor {name!r}, of which this rank holds "
                    f"{numel}; resume with the same model and cells"
                )
            values.copy_(named[name][part])

    def _pieces(self, flat: Mapping[int, torch.Tensor]) -> Iterator[tuple[torch.Tensor, str, int, slice]]:
        """Yield each piece of flat tensors, with its tensor's name and size here, and the piece's place in that."""
        for transfer in self._transfers:
            if transfer.number not in flat:
                continue
            at = 0
            for bucket in transfer.buckets:
                for item, start, stop in bucket.pieces:
                    origin, numel = self.layout.held(item)
                    values = flat[transfer.number][at : at + stop - start]
                    yield values, self.layout.name(item), numel, slice(start - origin, stop - origin)
                    at += stop - start


def _options_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options of an optimizer that has one group of tensors."""
    return {key: _copied(value) for key, value in optimizer.param_groups[0].items() if key != "params"}


def _moved(old: torch.Tensor, new: torch.Tensor, piece: slice) -> torch.Tensor:
    """Return a piece of a tensor that has the values of another one, which may be itself."""
    values = new[piece]
    return values if values.data_ptr() == old[piece].data_ptr() else values.copy_(old[piece])


def _cuts(optimizer: Optimizer, values: torch.Tensor) -> list[tuple[slice, dict[str, Any]]]:
    """Return how a piece is cut into steps, and options of the optimizer for each.

    On a CPU torch's fused SGD takes half the time. Where only whole vectors are given to it, its bits are those of the
    plain one, however many threads there are; those of other fused optimizers are not.
    """
    numel, group = len(values), optimizer.param_groups[0]
    is_plain = not any(group.get(option) for option in ("fused", "foreach", "differentiable"))
    if type(optimizer) is not SGD or values.device.type != "cpu" or not is_plain:
        return [(slice(0, numel), {})]
    vectors = numel - numel % VECTORS
    cuts = [(slice(0, vectors), {"fused": True}), (slice(vectors, numel), {})]
    return [cut for cut in cuts if cut[0].stop > cut[0].start] or cuts[1:]


MOST_KEPT = 64
"""What a server optimizer keeps for each element, and as numbers for all, at most"""
MOST_ASKED = 10**6
"""What a server optimizer was made with, at most: values, and characters of one"""


def check_saved(saved: Any) -> None:
    """Refuse the saved state of a server optimizer that is not of the form that is written; local."""
    fields = Fields(saved, "a server optimizer's saved state", error=CheckpointError, hint="load another checkpoint")
    for name in ("numbers", "options"):
        fields.mapping(name)
    fields.any("schedule")
    for name in ("elements", "numbers"):
        names = fields.any(name)
        if (
            not isinstance(names, Mapping | Sequence)
            or len(names) > MOST_KEPT
            or not all(isinstance(one, str) for one in names)
        ):
            fields.fail(f"{fields.place(name)} must be at most {MOST_KEPT} names, got {shown(names)}")
    if fields.optional("asked", Fields.mapping) is not None:
        fields.mapping_of("asked", MOST_ASKED, Fields.text, MOST_ASKED)
    for name, value in saved["numbers"].items():
        if not isinstance(value, torch.Tensor | int | float | None) or (
            isinstance(value, torch.Tensor) and value.numel() != 1
        ):
            fields.fail(f"{fields.place(name)} must be a number, got {shown(value)}")


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


CHUNK = 2**20
"""Elements of a tensor that are summed up at a time: each needs 24 bytes more."""


@torch.no_grad()
def check_start(
    entries: Sequence[TensorInfo], own_values: Iterable[tuple[int, int, torch.Tensor]], scope: RoundScope
) -> None:
    """Raise ConfigError, on all ranks, where the cells hold different parameters.

    Collective over the scope. ``own_values`` are what this rank sends, by tensor and first element, so that each
    element is counted once in each cell, whatever its cut.
    """
    sums = torch.zeros(len(entries), dtype=torch.int64, device=scope.device)
    for item, start, values in own_values:
        sums[item] += _sum_of_row(values, start)
    found = find_unequal_cells(sums, scope.topology.cell_of(scope.rank), scope.topology.cells, scope.world)
    if found is not None:
        item, cells = found
        raise ConfigError(
            f"cells {cells} start from other values of tensor {entries[item].name!r} than cell 0, but a server "
            "optimizer, norms and privacy need one model to start from; use xffl.shard, or load the same checkpoint "
            "everywhere before making the Aggregator. To resume between two rounds, make it first, then load the "
            "model, then its own state"
        )


@torch.no_grad()
def digest_of(model: nn.Module) -> list[int]:
    """Return a number for this rank's elements of each trainable parameter, by their bits and places; local.

    Versions of tensors would be cheaper, and do not tell of what was changed through ``.data``.
    """
    reshard(model)
    sums = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            values = local_tensor(parameter).detach()
            values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
            parts = torch.split(values, CHUNK) if len(values) else ()
            sums.append(sum(_sum_of_row(part, CHUNK * index) for index, part in enumerate(parts)))
    return [int(one) for one in sums]


def _sum_of_row(values: torch.Tensor, start: int) -> torch.Tensor:
    return sum_of_bits(values, torch.arange(start, start + len(values), device=values.device))
