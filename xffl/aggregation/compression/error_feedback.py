"""State of lossy codecs: the values that cells last agreed on, and the residual that is still to be sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from xffl.aggregation.compression.codecs import Codec
from xffl.errors import CheckpointError

if TYPE_CHECKING:
    from xffl.aggregation.engine.plan import Bucket, GroupTransfer

__all__ = ["ErrorFeedback", "ResidualStore"]


HUGE = 1e30
"""A type whose largest number is below this has less range than fp32, in which codes are read."""


class ErrorFeedback:
    """The memory of one bucket group on one sender: as large as the group, sharded as it is.

    What a code leaves out is added to the next value of the same place (error feedback: Seide et al., 2014;
    Karimireddy et al., arXiv 1901.09847). It counts only once :meth:`commit` has been called, so that a round which is
    not taken leaves no trace.
    """

    def __init__(self, codec: Codec, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._codec = codec
        self.reference = torch.zeros(numel, dtype=dtype, device=device)
        self._residuals: dict[tuple[int, int], torch.Tensor] = {}
        self._new_residuals: dict[tuple[int, int], torch.Tensor] = {}
        self._spare: dict[tuple[int, int], torch.Tensor] = {}
        self._norms: list[tuple[torch.Tensor, torch.Tensor]] = []

    def rollback(self) -> None:
        """Discard the residuals of a round that was not taken."""
        self._spare |= self._new_residuals
        self._new_residuals.clear()
        self._norms.clear()

    def forget(self) -> None:
        """Forget the residuals."""
        self.rollback()
        self._residuals.clear()

    def encode(
        self, place: tuple[int, int], values: torch.Tensor, code: torch.Tensor, spare: torch.Tensor, seed: int
    ) -> None:
        """Encode values and what is left from before, and keep what the code leaves out."""
        if place in self._residuals:
            values.add_(self._residuals[place])
        limit = torch.finfo(torch.float32).max
        self._codec.encode(values.clamp_(-limit, limit), code, seed)
        self._codec.decode(code, spare)
        residual = self._spare.pop(place, None)
        if residual is None:
            with torch.inference_mode(False):
                residual = torch.empty_like(values)
        self._new_residuals[place] = torch.sub(values, spare, out=residual)
        self._norms.append((values.dot(values), residual.dot(residual)))

    def difference(self, bucket: Bucket, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write how far a bucket's values are from the agreed ones."""
        reference = self._agreed(bucket)
        if values.dtype == out.dtype:
            torch.sub(values, reference, out=out)
        elif values.dtype.itemsize > out.itemsize:  # the difference first: rounded before, it would be lost
            out.copy_(torch.sub(values, reference))
        else:  # a narrow type would round it, or have no room for it
            out.copy_(values).sub_(reference)

    def advance(self, bucket: Bucket, mean: torch.Tensor, out: torch.Tensor) -> None:
        """Write a bucket's agreed values plus the mean of what the cells sent, rounded once."""
        limit = torch.finfo(out.dtype).max
        if limit < HUGE:
            out.copy_(mean.add_(self._agreed(bucket)).clamp_(-limit, limit))
        else:
            torch.add(self._agreed(bucket), mean, out=out)

    def _agreed(self, bucket: Bucket) -> torch.Tensor:
        """Return a bucket's agreed values; of 8-bit floats, which torch cannot add, a copy in fp32."""
        reference = self.reference[bucket.start : bucket.stop]
        return reference.float() if reference.itemsize == 1 else reference

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        """Read values back."""
        self._codec.decode(code, out)

    def commit(self, stage: torch.Tensor | None) -> torch.Tensor | None:
        """Conclude a round that was taken, whose agreed values ``stage`` holds; return the memory of those before."""
        for place, residual in self._new_residuals.items():
            if place in self._residuals:
                self._spare[place] = self._residuals[place]
            self._residuals[place] = residual
        self._new_residuals.clear()
        if stage is None:
            return None
        self.reference, spare = stage, self.reference
        return spare

    def norms(self) -> list[tuple[float, float]]:
        """Return, for each code of this round, the squared norms of what was to be sent and of what was left out."""
        if not self._norms:
            return []
        whole, left = torch.stack([torch.stack(column) for column in zip(*self._norms, strict=True)]).tolist()
        return list(zip(whole, left, strict=True))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of the agreed values and of the residuals on this rank."""
        left = {f"left {bucket} {part}": left.clone() for (bucket, part), left in self._residuals.items()}
        return {"reference": self.reference.clone()} | left

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what :meth:`state_dict` returned on this rank."""
        reference = state.get("reference")
        if reference is None or reference.shape != self.reference.shape or reference.dtype != self.reference.dtype:
            got = "nothing" if reference is None else f"{reference.numel()} {reference.dtype} values"
            raise CheckpointError(
                f"the codec's state holds {got} for a bucket group of {self.reference.numel()} {self.reference.dtype} "
                "values; resume with the same model, federation, bucket_bytes, form and codec"
            )
        self.rollback()
        self.reference.copy_(reference)
        self._residuals = {}
        for name, left in state.items():
            if name.startswith("left "):
                _, bucket, part = name.split()
                self._residuals[int(bucket), int(part)] = left.to(self.reference.device, copy=True)


class ResidualStore:
    """What lossy codecs carry from round to round on one rank, of all its bucket groups."""

    def __init__(self, transfers: Sequence[GroupTransfer], feedback: Mapping[int, ErrorFeedback]) -> None:
        self._transfers = tuple(transfers)
        self._feedback = feedback
        self._seeded: set[int] = set()

    @property
    def codec_error(self) -> float | None:
        """Error of what this rank sent in the last round, relative to what it had to send, in the L2 norm.

        ``None`` where nothing was encoded, or where it was so large that squares left fp32.
        """
        norms = [norm for feedback in self._feedback.values() for norm in feedback.norms()]
        whole = sum(norm[0] for norm in norms)
        if not norms or not math.isfinite(whole):
            return None
        return math.sqrt(sum(norm[1] for norm in norms) / whole) if whole else 0.0

    def rollback(self) -> None:
        """Forget what the last round has sent, and what one that was not taken has left behind."""
        for feedback in self._feedback.values():
            feedback.rollback()

    def is_encoding(self, fragment: int) -> bool:
        """Return whether a round has made the agreed state that lossy codecs start from."""
        return fragment in self._seeded

    def state_dict(self, plan: str) -> dict[str, Any]:
        """Return which fragments have an agreed state, and by bucket group its values and the residuals."""
        lanes = {
            str(self._transfers[number].group.key): feedback.state_dict() for number, feedback in self._feedback.items()
        }
        return {"plan": plan, "seeded": sorted(self._seeded), "lanes": lanes}

    def load_state_dict(self, state: Mapping[str, Any], plan: str) -> None:
        """Take over what :meth:`state_dict` returned on this rank."""
        if state["plan"] != plan:
            raise CheckpointError(
                f"the codecs' memory is that of another exchange ({state['plan']}) than this one ({plan}); resume with "
                "the same model, federation, bucket_bytes, form, rails and codec"
            )
        self.forget()
        for number, feedback in self._feedback.items():
            if self._transfers[number].group.fragment in state["seeded"]:
                feedback.load_state_dict(state["lanes"].get(str(self._transfers[number].group.key), {}))
        self._seeded = set(state["seeded"])

    def forget(self) -> None:
        """Forget what lossy codecs remember, where cells may no longer have the same: the next round is exact."""
        self._seeded.clear()
        for feedback in self._feedback.values():
            feedback.forget()

    def commit(self, fragment: int, stages: dict[int, torch.Tensor]) -> None:
        """Conclude a round that was taken."""
        for number, feedback in self._feedback.items():
            if self._transfers[number].group.fragment == fragment:
                spare = feedback.commit(stages.get(number))
                if spare is not None:
                    stages[number] = spare
        self._seeded.add(fragment)
