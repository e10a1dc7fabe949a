"""What a training loop wants to be asked by the rounds in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from xffl.errors import ConfigError

__all__ = ["NO_HOOKS", "LoopHooks", "check_hooks"]


@dataclass(frozen=True)
class LoopHooks:
    """What a training loop wants to be asked by its rounds; each may be left out.

    :param before_final_rounds: Called on all ranks of a cell that has made its last step, before it answers another
        round of the other cells. It may raise to leave instead.
    :param tell: Called before each round of an elastic federation, on all ranks of the cell with the same result: plain
        values that all cells of the round find in its report (``told``).
    :param is_stopping: Asked on the first rank of a cell of an elastic federation, while it waits for other cells,
        whether it is to stop. There is no round then, and MeetingLeft is raised where the cell has not joined yet.
    :param defers_start: Asked when a delayed round is due, with the same answer on all ranks of a cell: whether it
        starts before the next step instead of at the end of this one.
    :param defers_join: Asked when the block is entered, with the same answer on all ranks of a cell: whether the loop
        calls :meth:`xffl.FederatedScaling.join` by itself, after it has loaded a checkpoint in the block.
    """

    before_final_rounds: Callable[[], None] | None = None
    tell: Callable[[], Mapping[str, Any]] | None = None
    is_stopping: Callable[[], bool] | None = None
    defers_start: Callable[[], bool] | None = None
    defers_join: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            if (hook := getattr(self, one.name)) is not None and not callable(hook):
                raise ConfigError(
                    f"hook {one.name} must be a function or None, got {type(hook).__name__}; give "
                    f"LoopHooks({one.name}=...), with a function"
                )

    def joined_with(self, others: LoopHooks) -> LoopHooks:
        """Return these hooks, with those of ``others`` in their place where it has some.

        A round starts before the next step where one of the two says so; so it is with a join that is deferred.
        """
        return LoopHooks(
            before_final_rounds=others.before_final_rounds or self.before_final_rounds,
            tell=others.tell or self.tell,
            is_stopping=others.is_stopping or self.is_stopping,
            defers_start=_any_of(self.defers_start, others.defers_start),
            defers_join=_any_of(self.defers_join, others.defers_join),
        )


NO_HOOKS = LoopHooks()
"""Those of a loop that wants to be asked nothing"""


def _any_of(*hooks: Callable[[], bool] | None) -> Callable[[], bool] | None:
    """Return a hook that asks several, those that are there; ``None`` if none is."""
    given = tuple(hook for hook in hooks if hook is not None)
    return (lambda: any(asked() for asked in given)) if given else None


def check_hooks(hooks: object) -> None:
    """Raise ConfigError unless something is LoopHooks; local."""
    if not isinstance(hooks, LoopHooks):
        what = f"the class {hooks.__name__}" if isinstance(hooks, type) else type(hooks).__name__
        raise ConfigError(f"hooks must be LoopHooks or None, got {what}; give hooks=LoopHooks(tell=...)")
