"""Names that become code: here, and nowhere else in the package, a text decides what is imported.

Whoever wrote the text decides what it may name, so each call says who that was (:class:`Writer`). What a user wrote, on
a command line, in a configuration or in a program, may name anything that can be imported. What came in a file or from
a peer (exports, states, records, votes) is data of somebody else: its names are looked up in the registry of xffl's own
algorithms, and nothing is imported or called for them.

Before a class or function is called to make something, :func:`check_maker` compares it with what is to be made.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from importlib import import_module
from typing import Any

from xffl.errors import ConfigError

__all__ = ["Writer", "check_maker", "import_named"]


class Writer(Enum):
    """Who wrote a name."""

    USER = "the user"
    """The user of this process, or xffl itself: command lines, configurations, programs, tables of the package"""
    OTHERS = "others"
    """Whoever wrote a file or a message: exports, states, records, peers"""


def import_named(path: str, what: str, *, writer: Writer) -> Any:
    """Import an object by its dotted path; local.

    :param path: Module and name, with dots.
    :param what: What it stands for, to begin messages with.
    :param writer: Who wrote the path.
    :return: The object, whatever it is.
    :raises ConfigError: if it cannot be imported, or was not written by the user.
    """
    if writer is not Writer.USER:
        raise ConfigError(
            f"{what}: {path} is named by a file or a peer, for which nothing is imported; give a built-in name there, "
            "or this name by an option of your own"
        )
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as wrong:
        raise ConfigError(
            f"{what}: {path} cannot be imported ({wrong}); give the dotted path of a class or function, such as "
            "package.module.name, and set PYTHONPATH to the folder of its package (PYTHONPATH=. for the working "
            "folder, which is not searched by itself)"
        ) from wrong
    except (ImportError, AttributeError, TypeError, ValueError) as wrong:
        raise ConfigError(f"{what}: {path} cannot be imported ({wrong}); give that of a class or function") from wrong


def check_maker(target: Any, bases: Sequence[type], what: str) -> None:
    """Refuse what does not make an object of one of these classes, before it is called; local.

    A class must be derived from one of them, a function must be annotated to return one that is.

    :param target: The class or function.
    :param bases: Classes; what is to be made is an object of one of them.
    :param what: What the target stands for, to begin messages with.
    :raises ConfigError: if it is neither.
    """
    made = target if inspect.isclass(target) else _returned(target)
    if inspect.isclass(made) and issubclass(made, tuple(bases)):
        return
    wanted = " or ".join(f"{base.__module__}.{base.__qualname__}" for base in bases)
    # Not its repr, which may have an address: the message is the same on all ranks.
    got = type(target).__name__
    if inspect.isclass(target):
        got = "a class"
        hint = _how_to_become(target, bases, wanted)
    elif inspect.isroutine(target):
        got = "a function that does not say what it returns" if made is None else f"a function that returns {made!r}"
        hint = "annotate it with what it returns, or give a class"
    else:
        hint = "give the class or function that makes it"
    raise ConfigError(f"{what} must be a class, or a function that returns an object, of {wanted}, got {got}; {hint}")


def _how_to_become(target: type, bases: Sequence[type], wanted: str) -> str:
    """Tell how a class becomes one of the bases, of which a protocol asks for methods only."""
    (base, *others) = bases
    if others or not getattr(base, "_is_protocol", False):
        return f"derive it from {wanted}"
    methods = [name for name in vars(base) if not name.startswith("_") and not hasattr(target, name)]
    return f"it lacks {' and '.join(methods)}"


def _returned(target: Any) -> Any:
    """Return what a function is annotated to return; ``None`` where that is not known."""
    # An annotation may name what is imported for type checkers only.
    with suppress(NameError, TypeError, AttributeError, ValueError):
        return typing.get_type_hints(target).get("return")
    return None
