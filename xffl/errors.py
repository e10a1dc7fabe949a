"""The exceptions of xffl.

.. code-block:: text

   XfflError
   ├── ConfigError      (ValueError)    an invalid argument, option or model
   ├── TopologyError    (ValueError)    sizes and ranks that do not fit each other
   ├── LaunchError      (RuntimeError)  processes that cannot be found, started or joined
   ├── StateError       (RuntimeError)  calls in the wrong order
   ├── RoundError       (RuntimeError)  a round that did not take place
   └── CheckpointError  (RuntimeError)  something saved that cannot be trusted

A message holds the value, the rule and the knob that mends it.
"""

__all__ = [
    "CheckpointError",
    "ConfigError",
    "LaunchError",
    "RoundError",
    "StateError",
    "TopologyError",
    "XfflError",
]


class XfflError(Exception):
    """Base of everything that xffl raises on purpose."""


class ConfigError(XfflError, ValueError):
    """Report an invalid argument, option or model."""


class TopologyError(XfflError, ValueError):
    """Report sizes or ranks that do not fit each other."""


class LaunchError(XfflError, RuntimeError):
    """Report processes that cannot be found, started or joined."""


class StateError(XfflError, RuntimeError):
    """Report calls in the wrong order."""


class RoundError(XfflError, RuntimeError):
    """Report a round that did not take place; the message says which state the model is in."""


class CheckpointError(XfflError, RuntimeError):
    """Report something saved that cannot be trusted."""


class OtherLayoutError(ConfigError):
    """Report what each rank has kept for itself, in a checkpoint of other ranks; nothing was loaded.

    An elastic cell of a trainer loads the rest; others see it as a :class:`ConfigError`.
    """


class OtherStepsError(ConfigError):
    """Report the state of a loader whose steps had another number of samples, and that fits otherwise.

    A trainer's cell that comes back with another number of ranks begins the epoch anew; others see it as a
    :class:`ConfigError`.
    """


class ReplacedError(CheckpointError):
    """Report a checkpoint that was replaced or deleted while it was read, so that reading it again may work.

    Readers try again by themselves; callers see it as a :class:`CheckpointError` where that did not help.
    """


class MeetingLeft(Exception):
    """This cell was asked to stop while it waited for other cells, and waits no longer; on all of its ranks."""


class TornError(Exception):
    """Report inside a round that ranks may hold different weights; callers get a :class:`RoundError` in its place."""


def class_name(error: BaseException) -> str:
    """Return the name of the class in this module that an error is, from which other ranks make it; else its own."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__), type(error).__name__)


def public_name(error: BaseException) -> str:
    """Return the name of an error as messages give it: that of the public class in this module that it is, if any."""
    public = (kind for kind in type(error).__mro__ if kind.__module__ == __name__ and kind.__name__ in __all__)
    return next((kind.__name__ for kind in public), type(error).__name__)
