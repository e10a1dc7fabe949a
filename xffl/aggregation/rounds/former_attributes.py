"""What a training loop was asked through attributes before there were hooks."""

from __future__ import annotations

from xffl.errors import StateError

__all__ = ["FormerAttribute"]


class FormerAttribute:
    """An attribute that was set from outside once and is a hook now: who sets it is told so."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object | None, owner: type) -> FormerAttribute:
        if instance is None:
            return self
        raise self._refusal(instance)

    def __set__(self, instance: object, value: object) -> None:
        raise self._refusal(instance)

    def _refusal(self, instance: object) -> StateError:
        return StateError(
            f"{type(instance).__name__}.{self._name} is no attribute any more; give hooks=LoopHooks({self._hook}=...), "
            f"with a function, or call attach(LoopHooks({self._hook}=...))"
        )
