"""Ranks of a new group compare in one message what they otherwise compare in several, one after another.

In a new group a message takes long, and the cells that are left after a loss wait for these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum

from xffl.aggregation.engine.alike.arithmetic_check import Arithmetic, read_arithmetic
from xffl.aggregation.engine.planning.tensors import Axis
from xffl.aggregation.engine.setup import ComparedModels, Comparison, RankModel, arithmetic_of, plan_items
from xffl.distributed.agreement.consistency import compare_hashes, hash_of
from xffl.distributed.collectives import Group
from xffl.distributed.failures.waits import NamedWait
from xffl.errors import XfflError

__all__ = ["ComparisonAtOnce", "find_alike"]


class Subject(str, Enum):
    """What ranks compare before they make rounds together."""

    MODELS = "models"
    AXES = "axes"  # that tensors are cut along
    ARITHMETIC = "arithmetic"
    PLANS = "exchange plans"
    NUMBERS = "numbers of aggregators"


class ComparisonAtOnce(Comparison):
    """Compares all in one message. As a rule all is alike.

    What is not, or what a rank cannot tell, is compared again by itself, which tells how it differs.
    """

    def __init__(self, group: Group | None) -> None:
        super().__init__(group)
        self._alike: frozenset[str] = frozenset()

    def begin(self, own: RankModel | None) -> None:
        """Compare what this rank knows with what the others do; collective over the group."""
        alike = find_alike(_texts_of(own, self), self.group)
        self._alike = alike if Subject.AXES in alike else alike - {Subject.PLANS}

    def compare_models(self, text: str, error: XfflError | None) -> None:
        """Compare the models by themselves where they are not alike."""
        if Subject.MODELS not in self._alike:
            super().compare_models(text, error)

    def gather_axes(self, own: RankModel) -> Sequence[Sequence[Axis]]:
        """Gather the axes where they are not alike."""
        return (own.axes,) * own.scope.topology.cells if Subject.AXES in self._alike else super().gather_axes(own)

    def compare_arithmetic(self, arithmetic: Arithmetic, world: Group | None) -> None:
        """Compare what the ranks compute by itself where it is not alike."""
        if Subject.ARITHMETIC not in self._alike:
            super().compare_arithmetic(arithmetic, world)

    def compare_plans(self, plan: str, world: Group | None) -> None:
        """Compare the plans by themselves where they are not alike."""
        if Subject.PLANS not in self._alike:
            super().compare_plans(plan, world)

    def agree_on_number(self, number: int, world: Group | None) -> int:
        """Look for the highest number where they are not alike."""
        return number if Subject.NUMBERS in self._alike else super().agree_on_number(number, world)


def _texts_of(own: RankModel | None, comparison: Comparison) -> dict[str, str | None]:
    """Return what this rank knows of each subject, ``None`` for what it cannot tell; local."""
    texts: dict[str, str | None] = {subject.value: None for subject in Subject}
    if own is None:
        return texts
    texts[Subject.MODELS] = own.text
    texts[Subject.NUMBERS] = str(own.scope.state.activity.next_number)
    if own.tensors is None:
        # If all ranks cut the tensors along the same axes, this is what each of them plans from.
        axes = (own.axes,) * own.scope.topology.cells
        expected = ComparedModels(
            own.scope, own.options, own.manifest, axes=axes, replica_tensors=None, comparison=comparison
        )
        texts[Subject.AXES] = repr(own.axes)
        with suppress(XfflError):  # raised where it is compared by itself
            texts[Subject.ARITHMETIC] = read_arithmetic(arithmetic_of(expected))
        with suppress(XfflError):
            texts[Subject.PLANS] = plan_items(expected)[1]
    return texts


def find_alike(values: Mapping[str, object], group: Group | None = None) -> frozenset[str]:
    """Return the names of those values of which all ranks have the same; all ranks get the same names.

    Collective over the group: one all-reduce, of 16 bytes for each value. The names come in one order on all ranks.
    Values are the same where their ``repr`` is; ``None`` is one that a rank cannot tell, and never alike.
    """
    hashes = [None if value is None else hash_of((name, value)) for name, value in values.items()]
    with NamedWait(next(iter(values)), group):
        are_alike = compare_hashes(hashes, group)
    return frozenset(name for name, is_alike in zip(values, are_alike, strict=True) if is_alike)
