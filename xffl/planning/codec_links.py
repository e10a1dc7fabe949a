"""From which rate of a link downwards each codec makes rounds shorter: what crosses against the time of coding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from xffl.topology import Topology

__all__ = ["CODING", "CodingTime", "codec_limits"]


class CodingTime(NamedTuple):
    """The time of coding, in passes: how often the values could be read from memory meanwhile.

    :param encode: Passes for the code and the residual of what a rank sends.
    :param decode: Passes for what a code stands for.
    """

    encode: float
    decode: float


CODING: Mapping[str, CodingTime] = {
    "bf16": CodingTime(3.3, 0.7),
    "fp16": CodingTime(3.3, 0.7),
    "int8": CodingTime(4.4, 0.7),
    "int4": CodingTime(4.6, 1.8),
    "int2": CodingTime(19.0, 3.9),
    "sparseloco": CodingTime(29.0, 1.1),
    "topk:0.01": CodingTime(29.0, 0.4),
}
"""As measured on one core of a shared AMD EPYC that reads fp32 values at 18.7 GB/s."""


def codec_limits(
    topology: Topology, *, memory_gbps: float, rails: bool = False, own_links: bool = False
) -> dict[str, float]:
    """Return for each codec the rate of a cell's slow link, in Gbit/s, below which it makes a round shorter.

    Local and pure. A rank codes some buckets while others cross, so a round takes as long as the slower of both. On a
    link of that rate, values as they are cross in the time in which a rank encodes what it sends and decodes what it
    and the others have sent.

    :param topology: The federation; with one cell nothing crosses.
    :param memory_gbps: Rate at which a rank reads values in its memory, in Gbit/s.
    :param rails: Whether all replicas of a shard send, each a part of it.
    :param own_links: Whether every rank that sends has a link of its own, instead of one for its cell.
    :return: The rates by the codecs of :data:`CODING`, for the cells whose link is shared by the fewest; none for one
        cell.
    """
    cells = topology.cells
    if cells == 1:
        return {}
    senders = [topology.shards(cell) * (topology.replicas(cell) if rails else 1) for cell in range(cells)]
    lanes = 1 if own_links else min(senders)
    copies = 2 * (cells - 1) / cells
    return {name: copies * lanes * memory_gbps / (time.encode + cells * time.decode) for name, time in CODING.items()}
