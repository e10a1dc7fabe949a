"""What others wrote: the values of files and of peers, checked by type and limit where they are read.

A text is parsed first, by :func:`xffl.json_text.parse_json` or by :func:`xffl.yaml_text.parse_yaml`. Then
:class:`Fields` reads the values of a mapping one by one, each with its type and its limits, and raises the error class
that it was given, with the place, the rule and the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from xffl import checks
from xffl.errors import ConfigError, XfflError

__all__ = [
    "COUNT_LIMIT",
    "TEXT_LIMIT",
    "Fields",
]

COUNT_LIMIT = 2**53
"""The largest count: the first that a float, and so a program in another language, may confuse with the next one"""
TEXT_LIMIT = 4096
"""The most characters of one text, such as a name or a path, where no other limit is given"""


T = TypeVar("T")
P = ParamSpec("P")


class Fields:
    """The values of a mapping that others wrote, read one by one with a type and limits.

    A value that is missing, or is not what a method asks for, raises the given error class with the place of the value
    (``members[2].rank of FILE``). Names that nobody asks for are allowed, since newer versions add some, unless
    :meth:`refuse_others` is called. No method converts: ``"3"`` and ``3.0`` are no integers, 1 is no boolean.

    :param value: what was parsed; must be a mapping whose keys are texts.
    :param what: what it is, for errors: the path of a file, or who sent it.
    :param error: the class of the errors.
    :param hint: what the user can do, for the end of each error.
    :raises XfflError: of the class ``error``, where the value is no such mapping.
    """

    def __init__(self, value: Any, what: str, *, error: type[XfflError] = ConfigError, hint: str = "") -> None:
        self.what = what
        self._error = error
        self._hint = hint
        self._place = ""
        self._values: Mapping[str, Any] = self._checked_mapping(value, what)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    # One value --------------------------------------------------------------------------------------------------------

    def any(self, name: str) -> Any:
        """Return a value of any type, as it was parsed; it must be there."""
        if name not in self._values:
            near = checks.closest(name, list(self._values)[:1000])
            self.fail(f"{self._label(name)} is missing" + (f" (there is {checks.shown(near)})" if near else ""))
        return self._values[name]

    def integer(self, name: str, minimum: int | None = 0, maximum: int | None = COUNT_LIMIT) -> int:
        """Return an integer within the limits, both included."""
        return checks.integer(self._label(name), self.any(name), minimum, maximum, hint=self._hint, error=self._error)

    def number(
        self,
        name: str,
        minimum: float = -math.inf,
        maximum: float = math.inf,
        *,
        above: float = -math.inf,
        below: float = math.inf,
    ) -> float:
        """Return a finite number within the limits as a float."""
        return checks.number(
            self._label(name),
            self.any(name),
            minimum,
            maximum,
            above=above,
            below=below,
            hint=self._hint,
            error=self._error,
        )

    def real(self, name: str) -> float:
        """Return a number as a float; NaN and infinities are allowed, as a diverging loss is."""
        value = self.any(name)
        if type(value) not in (int, float):
            self._refuse(name, "a number", value)
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf

    def boolean(self, name: str) -> bool:
        """Return true or false; no number stands for them."""
        value = self.any(name)
        if not isinstance(value, bool):
            self._refuse(name, "true or false", value)
        return value

    def text(self, name: str, limit: int = TEXT_LIMIT, *, may_be_empty: bool = True) -> str:
        """Return a text of at most ``limit`` characters, none of them NUL."""
        value = self.any(name)
        if not isinstance(value, str) or "\0" in value or not (may_be_empty or value):
            self._refuse(name, "a text" if may_be_empty else "a text that is not empty", value)
        if len(value) > limit:
            self.fail(f"{self._label(name)} is a text of {len(value)} characters; at most {limit} are read")
        return value

    def choice(self, name: str, choices: Iterable[Any]) -> Any:
        """Return one of the choices."""
        value = self.any(name)
        checks.one_of(self._label(name), value, choices, hint=self._hint, error=self._error)
        return value

    def mapping(self, name: str) -> Fields:
        """Return a mapping of texts to values, to read its values in turn."""
        value = self._checked_mapping(self.any(name), self._label(name))
        return self._part(f"{self._place}{name}.", value)

    # Several values ---------------------------------------------------------------------------------------------------

    def optional(
        self, name: str, read: Callable[Concatenate[Fields, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Return what a method reads, ``None`` where the name is missing or its value is null.

        ``fields.optional("loss", Fields.number, 0)``
        """
        return None if self._values.get(name) is None else read(self, name, *args, **kwargs)

    def list_of(
        self, name: str, most: int, read: Callable[Concatenate[Fields, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Return a list of at most ``most`` items, each read by a method.

        ``fields.list_of("sizes", 10_000, Fields.integer, 1)``
        """
        value = self.any(name)
        if not isinstance(value, list | tuple):
            self._refuse(name, "a list", value)
        if len(value) > most:
            self.fail(f"{self._label(name)} has {len(value)} items; at most {most} are read")
        items = self._part(f"{self._place}{name}", {f"[{at}]": item for at, item in enumerate(value)})
        return [read(items, at, *args, **kwargs) for at in items]

    def mapping_of(
        self, name: str, most: int, read: Callable[Concatenate[Fields, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, T]:
        """Return a mapping of at most ``most`` names, each value read by a method.

        ``fields.mapping_of("counts", 10_000, Fields.integer, 0)``
        """
        return self.mapping(name).all_of(most, read, *args, **kwargs)

    def all_of(
        self, most: int, read: Callable[Concatenate[Fields, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, T]:
        """Return all values, at most ``most``, each read by a method."""
        if len(self._values) > most:
            place = self._place.rstrip(".")
            self.fail(f"{f'{place} of ' if place else ''}{self.what} has {len(self)} names; at most {most} are read")
        return {name: read(self, name, *args, **kwargs) for name in self._values}

    def refuse_others(self, *names: str) -> None:
        """Raise where there is a name that is none of these."""
        for name in self._values:
            if name not in names:
                near = checks.closest(name[:100], names)
                hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(names)}"
                self.fail(f"{self._label(name)} is unknown; {hint}")

    # Errors -----------------------------------------------------------------------------------------------------------

    def fail(self, text: str) -> NoReturn:
        """Raise the error class with a text and the hint."""
        raise self._error(f"{text}; {self._hint}" if self._hint else text)

    def place(self, name: str) -> str:
        """Return where a value stands, for an error: ``members[2].rank of FILE``."""
        return self._label(name)

    def _part(self, place: str, values: Mapping[str, Any]) -> Fields:
        """Return the values that stand at a place of these."""
        part = Fields({}, self.what, error=self._error, hint=self._hint)
        part._place = place
        part._values = values
        return part

    def _label(self, name: str) -> str:
        shown = name if len(name) <= 100 else f"{name[:100]}..."
        return f"{self._place}{shown} of {self.what}"

    def _refuse(self, name: str, rule: str, value: Any) -> NoReturn:
        self.fail(f"{self._label(name)} must be {rule}, got {checks.shown(value)}")

    def _checked_mapping(self, value: Any, label: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            self.fail(f"{label} must be a mapping of names to values, got {checks.shown(value)}")
        for key in value:
            if not isinstance(key, str):
                self.fail(f"{label} must have texts as names, got {checks.shown(key)}")
        return value
