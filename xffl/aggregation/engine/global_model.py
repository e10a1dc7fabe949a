"""The global model in fp32, and the state of the server rule that updates it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from xffl.aggregation.algorithms.server_optimizer import SavedServer, read_saved_server, take_step
from xffl.aggregation.arithmetic import piece_length, wide_type
from xffl.aggregation.engine.arena import Arena
from xffl.aggregation.engine.buffers import Layout
from xffl.aggregation.engine.named import named_pieces
from xffl.aggregation.engine.planning.transfers import Bucket, GroupTransfer
from xffl.aggregation.options import Options
from xffl.errors import CheckpointError, StateError
from xffl.reading import Fields

__all__ = ["GlobalModel"]


class GlobalModel:
    """The parameters that training changes, as all cells last agreed on them, in fp32 (fp64 for fp64).

    For each group of the rank that is exchanged there is one flat tensor of values, and one for each name of the server
    rule's state. A group has the same elements in the same order on all ranks that hold it, so they all take the same
    step. Each fragment has made steps of its own; all ranks count them, also those that hold nothing of it.
    """

    def __init__(
        self,
        transfers: Sequence[GroupTransfer],
        layout: Layout,
        options: Options,
        device: torch.device,
        *,
        arena: Arena | None = None,
    ) -> None:
        server = options.server
        self._transfers = [transfer for transfer in transfers if transfer.group.is_stepped]
        self.layout = layout
        self.device = device
        self._server = server
        self._kept_on = device if server is None or server.device is None else torch.device(server.device)
        self._arena = arena
        self._values = {
            transfer.number: self._make_table(transfer.group.numel, wide_type(transfer.dtype))
            for transfer in self._transfers
        }
        self._states: dict[int, dict[str, torch.Tensor]] = {}
        """By transfer; made for the first step."""
        self._steps = {} if server is None else dict.fromkeys(range(options.fragments), 0)
        """Steps that the server has made, by fragment."""
        self._is_known = True

    def _make_table(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self._arena is None:
            return torch.empty(numel, dtype=dtype, device=self._kept_on)
        return self._arena.give(numel, dtype, self._kept_on)

    @property
    def has_optimizer(self) -> bool:
        """Whether a server makes steps, also on a rank that holds no element."""
        return self._server is not None

    @property
    def steps(self) -> dict[int, int]:
        """How many steps the server has made of each fragment."""
        return dict(self._steps)

    @torch.no_grad()
    def reset_from_model(self) -> None:
        """Take the model as it is for what all cells agree on; local."""
        self.layout.look_up()
        for transfer in self._transfers:
            for bucket in transfer.buckets:
                buffer = torch.empty(bucket.stop - bucket.start, dtype=transfer.dtype, device=self.device)
                self.layout.pack(bucket, buffer)
                self._values[transfer.number][bucket.start : bucket.stop].copy_(buffer)
        self._forget_first_states()

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

    def check(self) -> None:
        """Raise where a round cannot go on from this state; local."""
        if not self._is_known:
            raise StateError(
                "the last agreed model and the server optimizer may differ between ranks since a round tore the model, "
                "or a state could not be loaded; load the aggregator's state of the same checkpoint on all ranks, or "
                "make a new Aggregator"
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

    # A step -----------------------------------------------------------------------------------------------------------

    def numbers(self, fragment: int) -> dict[str, float]:
        """Return what the server rule computes the next step of a fragment with; empty without a server; local."""
        return {} if self._server is None else self._server.numbers(self._steps[fragment])

    @torch.inference_mode(False)  # what is made here outlives the round
    @torch.no_grad()
    def reserve(self, fragment: int) -> None:
        """Make the state of a fragment's first step, before its round is agreed on; local."""
        if self._server is None:
            return
        for transfer in self._of(fragment):
            if transfer.number not in self._states:
                self._states[transfer.number] = self._server.rule.init(self._values[transfer.number])

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(
        self, fragment: int, means: Mapping[int, torch.Tensor], scale: float, numbers: Mapping[str, float]
    ) -> Iterator[tuple[GroupTransfer, Bucket, torch.Tensor]]:
        """Go on from the agreed model to the next, and yield each bucket with its new values, as they are written.

        Local, the same on all ranks that hold the same elements. It uses the means' memory, and counts once all buckets
        were taken; what stops it before leaves a state that has to be loaded anew. ``numbers``
        are those that :meth:`numbers` returned on the rank whose numbers all use.
        """
        for transfer in self._of(fragment):
            for bucket in transfer.buckets:
                piece = slice(bucket.start, bucket.stop)
                yield (
                    transfer,
                    bucket,
                    self._step_bucket(transfer.number, piece=piece, means=means, scale=scale, numbers=numbers),
                )
        if self._server is not None:
            self._steps[fragment] += 1

    def _step_bucket(
        self,
        number: int,
        piece: slice,
        means: Mapping[int, torch.Tensor],
        scale: float,
        numbers: Mapping[str, float],
    ) -> torch.Tensor:
        """Step one bucket, and return its new values in the type of the mean, where that lies."""
        values, mean = self._values[number][piece], means[number][piece]
        rule = None if self._server is None else self._server.rule
        if rule is None and scale == 1.0:
            values.copy_(mean)
            return mean
        state = {name: one[piece] for name, one in self._states.get(number, {}).items()}
        take_step(rule, values=values, mean=mean.to(self._kept_on), state=state, numbers=dict(numbers), scale=scale)
        is_alike = values.dtype == mean.dtype and values.device == mean.device
        return values if is_alike else mean.copy_(values)

    def _of(self, fragment: int) -> list[GroupTransfer]:
        return [transfer for transfer in self._transfers if transfer.group.fragment == fragment]

    def _forget_first_states(self) -> None:
        """Have the state before a first step made anew: it may depend on values that are others now."""
        for fragment, steps in self._steps.items():
            for transfer in self._of(fragment) if steps == 0 else ():
                self._states.pop(transfer.number, None)

    # Saved states -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the agreed model and the server's state by the names of tensors, of what this rank holds."""
        state = self.plain_state()
        for flat, named in self.tables(state):
            named.update(self.by_name(flat))
        return state

    def plain_state(self) -> dict[str, Any]:
        """Return :meth:`state_dict` without the tensors that are cut over ranks."""
        if self._server is None:
            return {"model": {}, "optimizers": {}}
        names, asked = self._server.state_names, self._server.asked
        return {
            "model": {},
            "optimizers": {
                fragment: SavedServer(steps, {name: {} for name in names if steps}, asked).plain
                for fragment, steps in self._steps.items()
            },
        }

    def tables(self, state: Mapping[str, Any]) -> Iterator[tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]]:
        """Yield the agreed model and what a state has of the server for each element: here, and in that state.

        In the order of all ranks; empty where this rank holds nothing of it.
        """
        yield self._values, state["model"]
        for fragment, saved in sorted(state["optimizers"].items()):
            for name, named in sorted(saved["elements"].items()):
                yield {one.number: self._states[one.number][name] for one in self._of(fragment)}, named

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned on this rank; bucket sizes may have changed since."""
        if "owned" in state:
            raise CheckpointError(
                "the state of the server was saved in parts, each by the one rank that stepped it (server_step), and "
                "each rank steps all that it holds now; go on from the model alone (a checkpoint's reset)"
            )
        state = {**state, "optimizers": self.load_plain_state(state)}
        self.forget()  # again, until all of it is here
        for flat, named in self.tables(state):
            self._from_names(named, flat)
        self._is_known = True

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_plain_state(self, state: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Take over a state without the tensors that are cut over ranks, and make memory for these; local.

        Returns what the state has of each fragment's server, under the names of today.
        """
        optimizers: Mapping[int, Any] = state["optimizers"]
        here = {transfer.group.fragment for transfer in self._transfers} & self._steps.keys()
        if not here <= optimizers.keys() or not optimizers.keys() <= self._steps.keys():
            raise CheckpointError(
                f"the state has server optimizers for fragments {sorted(optimizers)} and this aggregator for "
                f"{sorted(self._steps)}; resume with the same server and fragments"
            )
        what = "a server optimizer's saved state"
        saved = {
            fragment: read_saved_server(Fields(one, what, error=CheckpointError, hint="load another checkpoint"))
            for fragment, one in optimizers.items()
        }
        for one in saved.values():
            assert self._server is not None, "without one there are no fragments of it"
            self._server.check_saved(one, "the state", "leave the state out (a checkpoint's reset)")
        self.forget()  # what follows may end halfway
        # Older states tell the steps of a fragment only on ranks that hold some of it: see agree_on_steps.
        self._steps = {fragment: saved[fragment].step if fragment in saved else 0 for fragment in self._steps}
        self._states = {
            transfer.number: {
                name: self._make_table(transfer.group.numel, wide_type(transfer.dtype))
                for name in saved[transfer.group.fragment].elements
            }
            for transfer in self._transfers
            if transfer.group.fragment in saved and saved[transfer.group.fragment].step
        }
        self._is_known = True
        return {fragment: one.plain for fragment, one in saved.items()}

    def count_steps(self, steps: Mapping[int, int]) -> None:
        """Take over how many steps were made of each fragment, from ranks that hold some of it; local."""
        self._steps = dict(steps)

    @torch.no_grad()
    def take_over(self, last: GlobalModel) -> None:
        """Go on from another global model of this rank, whose memory this one uses where both order it alike; local.

        The other one may go on as long as this one makes no step.
        """
        state = last.plain_state()
        # Elements lie in the order of the buckets, which may be others where other cells have come.
        mine_at, theirs_at = (
            (model._kept_on, [(one.number, [bucket.pieces for bucket in one.buckets]) for one in model._transfers])
            for model in (self, last)
        )
        if last.has_optimizer:  # else it is that of the first round, which is no step of a server
            self._steps = dict(last._steps)
        if mine_at == theirs_at:
            self._values = dict(last._values)
            self._states = dict(last._states)
            return
        if last.has_optimizer:
            self.load_plain_state(state)
        for (mine, _), (theirs, _) in zip(self.tables(state), last.tables(state), strict=True):
            self._from_names(last.by_name(theirs), mine)

    @torch.no_grad()
    def load_model(self, named: Mapping[str, torch.Tensor]) -> None:
        """Take over the last agreed model alone, what :meth:`state_dict` returned of it on this rank."""
        self._from_names(named, self._values)
        self._forget_first_states()

    def by_name(self, flat: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Put flat tensors of whole groups together to the tensors that this rank holds."""
        named: dict[str, torch.Tensor] = {}
        for values, name, numel, part in named_pieces(flat, self._transfers, self.layout):
            if name not in named:
                named[name] = torch.empty(numel, dtype=values.dtype, device="cpu")
            named[name][part].copy_(values)
        return named

    def _from_names(self, named: Mapping[str, torch.Tensor], flat: Mapping[int, torch.Tensor]) -> None:
        for values, name, numel, part in named_pieces(flat, self._transfers, self.layout):
            if name not in named or named[name].numel() != numel:
                got = f"{named[name].numel()} elements" if name in named else "nothing"
                raise CheckpointError(
                    f"the state of the last agreed model holds {got} for tensor {name!r}, of which this rank holds "
                    f"{numel}; resume with the same model and cells"
                )
            values.copy_(named[name][part])
