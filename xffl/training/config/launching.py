"""From a configuration to a trainer: its class, the ranks and cells that are asked for, and a run in this process."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from xffl.checks import integer_fields
from xffl.cluster.cells import Federation, read_federation
from xffl.cluster.environment import detect_environment, request_federation, requested_federation, sources_named
from xffl.errors import ConfigError
from xffl.topology import Topology

__all__ = ["LaunchConfig", "ask_for_cells", "choose_federation", "config_class", "find_trainer", "fit"]


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How ``xffl exec`` starts a configuration.

    :param processes: Processes to start; by default 1 on this machine, and as many as the job has tasks inside of one.
        Where a launcher has started them, as many.
    :param federated: Ranks of each cell, or of all cells, or a rule such as ``auto`` that finds them; the session takes
        them as ``XFFL_FEDERATED``.
    :param hsdp: Ranks that hold one copy of the model; the session takes them as ``XFFL_HSDP``.
    :param timeout_s: Seconds after which processes started here are ended.
    """

    processes: int | None = None
    federated: int | tuple[int, ...] | str | None = None
    hsdp: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        hint = "give such a number, or leave it out"
        integer_fields(self, "processes", "hsdp", prefix="launch.", hint=hint, may_be_none=True)
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"launch.timeout_s {self.timeout_s} is not above 0; {hint}")
        object.__setattr__(self, "federated", read_federation(self.federated, "launch.federated"))


def find_trainer(name: str | None, folder: str) -> type:
    """Import a trainer's class; local.

    :param name: Its dotted path, such as ``train.DigitsTrainer``.
    :param folder: Where modules are looked for before all other places, from now on.
    :return: The class.
    :raises ConfigError: if there is none of that name. What the module itself raises is passed on.
    """
    module, _, attribute = (name or "").rpartition(".")
    if not module or not attribute:
        raise ConfigError(f"trainer is {name!r}; give the dotted path of a class, such as train.DigitsTrainer")
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    try:
        found = getattr(import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another one
        raise ConfigError(
            f"trainer {name}: there is no module {error.name!r} in {folder}, nor installed; put {error.name}.py beside "
            "the configuration"
        ) from error
    if not isinstance(found, type) or not callable(getattr(found, "fit", None)):
        what = "has no such name" if found is None else f"has {found!r} there"
        raise ConfigError(f"trainer {name}: module {module} {what}; name a class with a method fit")
    return found


def config_class(trainer: type) -> type:
    """Return the dataclass that a trainer's annotation ``config`` names; local.

    :param trainer: The trainer's class.
    :return: The dataclass, of the first class in its order of resolution that says.
    :raises ConfigError: if none says.
    """
    for one in trainer.__mro__:
        hint = inspect.get_annotations(one).get("config")
        if hint is None:
            continue
        names = {**vars(sys.modules[one.__module__]), one.__name__: one}
        try:
            kind = typing.get_type_hints(SimpleNamespace(__annotations__={"config": hint}), globalns=names)["config"]
        except NameError as error:
            raise ConfigError(
                f"annotation config: {hint} of {one.__qualname__} cannot be resolved: {error}; import it outside "
                "'if TYPE_CHECKING'"
            ) from error
        if isinstance(kind, type) and is_dataclass(kind):
            return kind
    raise ConfigError(
        f"trainer {trainer.__qualname__} does not say what its configuration is; annotate it: config: MyTrainerConfig"
    )


def choose_federation(
    config: object,
    launch: LaunchConfig,
    origins: Mapping[str, str],
    world_size: int,
    *,
    federated: Federation | None = None,
    hsdp: int | None = None,
) -> tuple[Federation | None, int | None]:
    """Return the cells and replicas that are asked for; local.

    Options of ``xffl exec`` beat the section ``launch`` where the command line or the environment has set it, which
    beats ``XFFL_FEDERATED`` and ``XFFL_HSDP``, which beat it where a file has.

    :param config: The trainer's configuration; ``distributed.federated`` may not say something else.
    :param launch: The section.
    :param origins: The origins of its values.
    :param world_size: Number of ranks.
    :param federated: What the option says.
    :param hsdp: What the option says.
    :return: Federated sizes, or a rule that finds them, and replica size, as :func:`xffl.session` takes them.
    :raises XfflError: if they do not fit each other or the world.
    """
    variable, variable_hsdp = requested_federation()

    def pick(option: Any, name: str, variable: Any) -> tuple[Any, str]:
        """Return the value that beats the others, and where it comes from."""
        origin = origins.get(f"launch.{name}", "default")
        given = (getattr(launch, name), f"launch.{name} ({origin})")
        told = (variable, f"XFFL_{name.upper()}")
        order = (told, given) if origin.startswith("file ") else (given, told)
        chosen = ((option, f"--{name}"), *order)
        return next(((value, source) for value, source in chosen if value is not None), (None, ""))

    sizes, source = pick(federated, "federated", variable)
    replica_size, replica_source = pick(hsdp, "hsdp", variable_hsdp)

    def fitted(sizes: int | tuple[int, ...] | None) -> Topology:
        with sources_named(filter(None, (source, replica_source))):
            return Topology(world_size, sizes, replica_size)

    asked = getattr(getattr(config, "distributed", None), "federated", None)
    if isinstance(asked, str):
        # xffl exec has put what it found by a rule into the variable.
        is_same = sizes in (None, asked, variable)
        sizes = asked if sizes is None else sizes
    elif asked is not None:
        with sources_named(filter(None, ("distributed.federated", replica_source))):
            wanted = Topology(world_size, asked, replica_size)
        is_same = sizes is None or (not isinstance(sizes, str) and fitted(sizes) == wanted)
    else:
        is_same = True
    if not is_same:
        raise ConfigError(
            f"cells of {sizes} are asked for by {source}, but distributed.federated is {asked}; leave one of them out"
        )
    if not isinstance(sizes, str):
        fitted(sizes)
    return sizes, replica_size


def ask_for_cells(
    config: object,
    launch: LaunchConfig,
    origins: Mapping[str, str],
    *,
    federated: Federation | None = None,
    hsdp: int | None = None,
) -> None:
    """Check that a configuration fits what was started, and ask for its cells; local.

    :param config: The trainer's configuration.
    :param launch: How the configuration wants to be started; ``processes`` must be what has been.
    :param origins: Where the values come from.
    :param federated: Cells that beat those of the configuration.
    :param hsdp: Replica size that beats that of the configuration.
    :raises XfflError: if it does not fit.
    """
    found = detect_environment()
    if launch.processes not in (None, found.world_size):
        by = "there is" if found.launcher == "none" else f"{found.launcher} has started"
        raise ConfigError(
            f"launch.processes is {launch.processes} ({origins.get('launch.processes')}), but {by} {found.world_size}; "
            f"start {launch.processes}, or give --launch.processes {found.world_size}"
        )
    request_federation(*choose_federation(config, launch, origins, found.world_size, federated=federated, hsdp=hsdp))


def fit(trainer: type, config: object, origins: Mapping[str, str]) -> Any:
    """Make a trainer and train. Every rank calls it.

    :param trainer: The trainer's class.
    :param config: Its configuration.
    :param origins: Where the values come from.
    :return: What ``fit`` returns.
    """
    return trainer(config, origins=origins).fit()
