"""Lossy codecs in a round: steps since the last agreed state cross encoded, with error feedback."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xffl.aggregation.compression import CodePlace, ErrorFeedback
from xffl.aggregation.engine.buffers import Layout, ModelCopy, aligned
from xffl.aggregation.engine.exchange import RoundRun
from xffl.aggregation.engine.planning.transfers import Bucket, GroupTransfer, RoundContext
from xffl.aggregation.engine.stages.leftovers import Leftovers
from xffl.aggregation.engine.stages.stage import RoundStage
from xffl.aggregation.engine.transport import Crossing, ExactValues, Link
from xffl.errors import CheckpointError

__all__ = ["Codecs", "EncodedSteps"]


class Codecs(RoundStage):
    """Lossy codecs, and what they carry from round to round on one rank, of all its bucket groups.

    The first round of each fragment is exact, and makes the agreed state that steps are measured from. So is the first
    one with other cells, to which what was left out before is added.
    """

    key = "codecs"

    def __init__(self, transfers: Sequence[GroupTransfer], layout: Layout, link: Link, plan: str) -> None:
        self._transfers = tuple(transfers)
        self._layout = layout
        self._link = link
        self._plan = plan  # of the exchange that this fits
        self._seeded: set[int] = set()
        self.leftovers = Leftovers(transfers, layout, link.cell)
        encoded = [transfer for transfer in transfers if transfer.codec is not None]
        self.feedback = {
            transfer.number: ErrorFeedback(transfer.codec, transfer.group.numel, transfer.dtype, link.device)
            for transfer in encoded
            if transfer.codec is not None and transfer.is_sender
        }
        # A row for each cell's values as the codec gives them back, one for what it leaves out, one for their mean.
        widest = max((bucket.stop - bucket.start for transfer in encoded for bucket in transfer.buckets), default=0)
        rows = link.cells + 2 if widest else 0
        self.scratch = torch.empty(rows, widest, dtype=torch.float32, device=link.device)
        for transfer in encoded:
            link.hold_slots(transfer, self._slot_bytes(transfer), 2 if transfer.reduce_scatter else 1)

    def _slot_bytes(self, transfer: GroupTransfer) -> int:
        """Return what codes need that arrive from the other cells, and that leave."""
        assert transfer.codec is not None
        rows = len(self._link.others) + (self._link.cells if transfer.reduce_scatter else 1)
        numels = {part.stop - part.start for bucket in transfer.buckets for part in transfer.parts(bucket)}
        return max((aligned(transfer.codec.nbytes(numel)) for numel in numels), default=0) * rows

    def begin(self, fragment: int, copy: ModelCopy) -> ModelCopy:
        """Forget what the last round has sent, and what one that was not taken has left behind."""
        for feedback in self.feedback.values():
            feedback.rollback()
        self.leftovers.rollback()
        return copy

    def status(self, fragment: int) -> Mapping[str, Any]:
        """Tell whether this rank knows the agreed state that codecs start from."""
        return {"is_encoding": fragment in self._seeded}

    def before_exchange(self, run: RoundRun, context: RoundContext) -> None:
        """Note what this cell's values count for."""
        self.leftovers.note_share(context)

    def is_encoding(self, transfer: GroupTransfer) -> bool:
        """Return whether a group's values cross encoded: whether a round has made the agreed state to start from."""
        return transfer.codec is not None and transfer.group.fragment in self._seeded

    def payload(self, crossing: Crossing) -> ExactValues | None:
        """Encode the step since the last agreed state; or add what was left out before to the values as they are."""
        if self.is_encoding(crossing.transfer):
            return EncodedSteps(crossing, self)
        return CompletedValues(crossing, self.leftovers) if self.leftovers.has(crossing.transfer) else None

    def seed_of(self, round_number: int, transfer: GroupTransfer, place: CodePlace) -> int:
        """Return a seed for stochastic rounding that no other code of the run has."""
        numbers = (
            round_number,
            transfer.number,
            place.bucket,
            place.number,
            self._link.number,
            self._link.sizes,
        )
        return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest(), "little")

    def written(self, transfer: GroupTransfer, bucket: Bucket, new: torch.Tensor) -> None:
        """Note what all have agreed on, where it is written while others cross."""
        feedback = self.feedback.get(transfer.number)
        if feedback is not None:
            feedback.reference[bucket.start : bucket.stop].copy_(new)

    def report(self) -> Mapping[str, Any]:
        """Tell what codecs have left out of what this rank sent."""
        return {"codec_error": self._error()}

    def _error(self) -> float | None:
        """Return the relative L2 error of what was sent; ``None`` for nothing, or where squares left fp32."""
        norms = [norm for feedback in self.feedback.values() for norm in feedback.norms()]
        whole = sum(norm[0] for norm in norms)
        if not norms or not math.isfinite(whole):
            return None
        return math.sqrt(sum(norm[1] for norm in norms) / whole) if whole else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return which fragments have an agreed state, and by bucket group its values and the residuals."""
        lanes = {str(self._transfers[place].group.key): one.state_dict() for place, one in self.feedback.items()}
        return {"plan": self._plan, "seeded": sorted(self._seeded), "lanes": lanes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned on this rank."""
        if state["plan"] != self._plan:
            raise CheckpointError(
                f"the codecs' memory is that of another exchange ({state['plan']}) than this one ({self._plan}); "
                "resume with the same model, federation, bucket_bytes, form, rails and codec"
            )
        self.forget()
        for place, feedback in self.feedback.items():
            group = self._transfers[place].group
            if group.fragment in state["seeded"]:
                feedback.load_state_dict(state["lanes"].get(str(group.key), {}))
        self._seeded = set(state["seeded"])

    def forget(self) -> None:
        """Forget what lossy codecs remember, where cells may no longer have the same: the next round is exact."""
        self._seeded.clear()
        self.leftovers.forget()
        for feedback in self.feedback.values():
            feedback.forget()

    def start_from_model(self) -> None:
        """Take the model as it is for the agreed state."""
        for number, feedback in self.feedback.items():
            for bucket in self._transfers[number].buckets:
                self._layout.pack(bucket, feedback.reference[bucket.start : bucket.stop])

    def commit(self, run: RoundRun) -> None:
        """Conclude a round that was taken: where its values wait is the agreed state now, and the old one is free."""
        staging = run.memory.lasting.staging
        fragment = run.fragment
        for place, feedback in self.feedback.items():
            if self._transfers[place].group.fragment == fragment:
                spare = feedback.commit(staging.get(place))
                if spare is not None:
                    staging[place] = spare
        self._seeded.add(fragment)
        self.leftovers.commit(fragment)

    def take_over(self, last: RoundStage) -> None:
        """Keep what codecs have left out in rounds with other cells."""
        assert isinstance(last, Codecs), "of the same kind"
        self.leftovers.load(last.residuals())

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return copies of what codecs have left out on this rank, by names of tensors, in rounds with any cells."""
        return self.leftovers.by_name(self.feedback)


class CompletedValues(ExactValues):
    """A bucket's values as they are, and what codecs have left out of what was sent in rounds with other cells."""

    def __init__(self, crossing: Crossing, leftovers: Leftovers) -> None:
        self._leftovers = leftovers
        self._read = crossing.values
        super().__init__(crossing._replace(values=crossing.out))  # added up where the result goes

    def write(self) -> None:
        """Add what was left out."""
        with self.transport.profile.capture_failure("encode"):
            if self._read is not self.values:
                self.values.copy_(self._read)
            if self.is_source:
                self._leftovers.add(self.transfer, self.bucket, self.values)


class EncodedSteps(ExactValues):
    """What a bucket differs by from the last agreed state, written by the group's codec.

    Everybody, the sender too, goes on with what the codes say, so that all ranks stay the same to the bit.
    """

    def __init__(self, crossing: Crossing, codecs: Codecs) -> None:
        self._codecs = codecs
        super().__init__(crossing)

    def prepare(self) -> None:
        """Make room for the codes of both hops."""
        transfer, here = self.transfer, self.here
        self._parts = transfer.parts(self.bucket)
        assert transfer.codec is not None
        sizes = [transfer.codec.nbytes(part.stop - part.start) for part in self._parts]
        addressees = range(self.link.cells) if transfer.reduce_scatter else [here]
        self.slot = self.link.slots.acquire()
        rows = self.link.slots.rows(self.slot, torch.uint8, len(self.others) + len(addressees))
        own = {cell: row[: sizes[cell]] for cell, row in zip(addressees, rows[len(self.others) :], strict=True)}
        self._leaving = own
        self.send = {cell: own.get(cell, own[here]) for cell in self.others} if self.is_source else {}
        incoming = dict(zip(self.others, rows, strict=False))
        self.codes = {cell: row[: sizes[here]] for cell, row in incoming.items()} | {here: own[here]}
        self.receive = {cell: self.codes[cell] for cell in self.arriving}
        # In the second hop, the codes of the results: their rows are free again once this cell has combined its part.
        self._result_codes = {cell: row[: sizes[cell]] for cell, row in incoming.items()} | {here: own[here]}
        self.feedback = self._codecs.feedback[transfer.number]
        self._mean = self._codecs.scratch[-1, : self.values.numel()]

    def write(self) -> None:
        """Write this rank's step since the last agreed state, part by part."""
        if not self.is_source:
            return
        with self.transport.profile.capture_failure("encode"):
            step = self._mean  # free until the mean is taken
            self.feedback.difference(self.bucket, self.values, step)
            self._codecs.leftovers.add(self.transfer, self.bucket, step)
            for cell, code in self._leaving.items():
                self._encode(CodePlace(self.bucket.number, cell), step[self._parts[cell]], code)

    def _encode(self, place: CodePlace, values: torch.Tensor, code: torch.Tensor) -> None:
        seed = self._codecs.seed_of(self.transport.context.number, self.transfer, place)
        spare = self._codecs.scratch[-2, : values.numel()]
        self.feedback.encode(place=place, values=values, code=code, spare=spare, seed=seed)

    def combine(self) -> None:
        """Combine what the codes of this cell's part say, and encode the result for the second hop."""
        if not self.transfer.reduce_scatter:
            return
        own = self._mean[self._parts[self.here]]
        with self.transport.profile.capture_failure("combine"):
            self._combine_codes(own)
            self._encode(CodePlace(self.bucket.number, None), own, self._result_codes[self.here])

    def _combine_codes(self, out: torch.Tensor) -> None:
        rows = [self._codecs.scratch[row, : out.numel()] for row in range(len(self.sources))]
        for cell, row in zip(self.sources, rows, strict=True):
            self.feedback.decode(self.codes[cell], row)
        self.combine_steps(rows, out)

    def combine_steps(self, steps: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Combine the cells' steps, in the order of the cells."""
        self.transport.combine(self.transfer, list(steps), out)

    def second_hop(self) -> tuple[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]]:
        """Return the codes of this cell's result and where to receive the others', by the other cell."""
        codes = self._result_codes
        return dict.fromkeys(self.others, codes[self.here]), {cell: codes[cell] for cell in self.others}

    def finish(self) -> None:
        """Move the agreed state by what the codes of the result say."""
        with self.transport.profile.capture_failure("combine"):
            if self.transfer.reduce_scatter:
                for cell, part in enumerate(self._parts):
                    self.feedback.decode(self._result_codes[cell], self._mean[part])
            else:
                self._combine_codes(self._mean)
            self.feedback.advance(self.bucket, self._mean, self.out)
        self.link.slots.release(self.slot)
