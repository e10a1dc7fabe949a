"""How gloo connects the ranks of a group: all of them to all when it is made, or two of them at their first message.

In a mesh each rank stores 154 + 8 N bytes for a group of N ranks, reads that of all others, and keeps N - 1 sockets:
at 4,096 ranks rank 0's store hands out 552 GB. torch 2.11 to 2.13 connect lazily if ``TORCH_GLOO_LAZY_INIT`` says so,
which they read for each group that they make, and they take no option of a group in its place:
https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp
(``getDefaultGlooLazyInit``).

Lazy connections are worse in two ways, so they are for large groups that run collectives alone, and opened when these
are made. One side of a pair waits for the other to connect: it notices that this one is lost only after five times the
group's timeout (``Pair::waitUntilConnected``), and not at once; and a message that is only to be started waits, too. A
barrier opens all connections that gloo's other collectives use, but those of gathers to one rank and of all-to-all. The
votes of rounds message single ranks of the world, too: an aggregator opens these connections when it is made.

Two more variables of gloo's, read for each group, make meshes cheaper
(https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/context.cc, ``createAndConnectAllPairs``; in torch 2.11 to
2.13):

- ``GLOO_ENABLE_STORE_V2_API``: a rank reads the addresses of 128 others with one request, from stores that can
  (``Store.has_extended_api``: TCPStore and HashStore, not FileStore). No other rank has to do so, too. The request
  waits as long as the store says, and not the group: :mod:`xffl.distributed.groups` ends waits that are longer.
- ``GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER``: an address is 154 bytes at any N. All ranks of a group have to do so: a rank
  without it reads numbers that are not there. So it is for large groups only, in which ranks message each other.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum

from xffl.compat.datasets import ENVIRON

__all__ = [
    "BATCH",
    "BATCH_VARIABLE",
    "LAZY_VARIABLE",
    "MESH_LIMIT",
    "MESH_LIMIT_OF_MANY",
    "SHORT_VARIABLE",
    "Form",
    "connect_as",
    "form_of_group",
    "is_lazy",
]

LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
"""torch's own variable."""
BATCH_VARIABLE = "GLOO_ENABLE_STORE_V2_API"
"""gloo's own: addresses are read many at once."""
BATCH = 128
"""How many at once."""
SHORT_VARIABLE = "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"
"""gloo's own: addresses are without the numbers of pairs."""
MESH_LIMIT = 256
"""Ranks of the largest world whose groups are meshes: 1,000 requests of rank 0's store, and 144 MB from it."""
MESH_LIMIT_OF_MANY = 32
"""Ranks of the largest group that is a mesh in larger worlds, where there are many such groups."""

_TRUE = ("1", "y", "yes", "t", "true")
"""What torch takes for yes, in capitals, too."""


def is_lazy(size: int, environ: Mapping[str, str] = ENVIRON, *, world_size: int | None = None) -> bool:
    """Tell whether a group of so many ranks is to connect lazily; local.

    A value of the user's own decides for all sizes.

    :param size: Ranks of the group.
    :param environ: The environment.
    :param world_size: Ranks of the world that it is a part of; ``None``: it is the world.
    :return: Whether it is.
    """
    if not _is_unset(LAZY_VARIABLE, environ):
        return environ[LAZY_VARIABLE].lower() in _TRUE
    # Connections over TLS, and those of other systems than Linux, refuse it.
    is_possible = sys.platform == "linux" and environ.get("GLOO_DEVICE_TRANSPORT", "TCP").upper() == "TCP"
    is_of_many = (size if world_size is None else world_size) > MESH_LIMIT
    return is_possible and is_of_many and size > min(MESH_LIMIT, MESH_LIMIT_OF_MANY)


class Form(Enum):
    """How the ranks of a group over gloo find and connect each other; the value is the variables that say so."""

    MESH = (BATCH_VARIABLE,)
    """All to all; each rank reads which number its pair has at each other one"""
    SHORT_MESH = (BATCH_VARIABLE, SHORT_VARIABLE)
    """All to all, by the numbers of ranks"""
    LAZY = (LAZY_VARIABLE,)
    """Two at their first message"""


def form_of_group(
    size: int, environ: Mapping[str, str] = ENVIRON, *, world_size: int | None = None, has_messages: bool = False
) -> Form:
    """Return how a group of so many ranks is to connect; local, and the same on all its ranks.

    :param size: Ranks of the group.
    :param environ: The environment.
    :param world_size: Ranks of the world that it is a part of; ``None``: it is the world.
    :param has_messages: Whether single ranks message each other in it, instead of collectives alone.
    :return: The form.
    """
    if not is_lazy(size, environ, world_size=world_size):
        return Form.MESH
    is_asked_for = not _is_unset(LAZY_VARIABLE, environ)
    return Form.SHORT_MESH if has_messages and not is_asked_for else Form.LAZY


def _is_unset(name: str, environ: Mapping[str, str]) -> bool:
    """Tell whether the user has not set a variable."""
    return (environ is ENVIRON and name in _set_here) or name not in environ


_set_here: set[str] = set()
"""Variables of this process that a block has set, and not the user: gloo reads them from the process alone."""


@contextmanager
def connect_as(form: Form) -> Iterator[None]:
    """Let the groups over gloo that are made in the block have a form; values of the user's own stay.

    One thread at a time may be in such a block (:func:`xffl.distributed.groups.in_turn`): gloo reads the variables of
    the process, and two ranks that read unlike ones do not find each other.

    :param form: The form.
    :yield: Nothing.
    """
    names = {name for name in form.value if name not in os.environ}
    _set_here.update(names)  # first, for threads that look: what stands there is not the user's
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        _set_here.difference_update(names)
