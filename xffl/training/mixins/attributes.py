"""Which attributes a hook of a trainer has set: models, optimizers, schedulers, metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

__all__ = ["Attributes"]

T = TypeVar("T")


class Attributes(Generic[T]):
    r"""The names under which an object holds things of some classes.

    :param owner: The object.
    :param \*kinds: The classes.
    """

    def __init__(self, owner: object, *kinds: type[T]) -> None:
        self._owner, self._kinds = owner, kinds
        self.names: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what the block sets, in order.

        :yield: Nothing.
        """
        before = dict(vars(self._owner))
        yield
        self.names += [
            name
            for name, value in vars(self._owner).items()
            if isinstance(value, self._kinds) and before.get(name) is not value and name not in self.names
        ]
