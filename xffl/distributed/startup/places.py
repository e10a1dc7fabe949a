"""What the ranks of a world claim of their places, compared over the store where they meet.

Launchers tell a rank its number on its host, but often not how many ranks are there, or which of the nodes it is; and
what wrappers of sites set by hand may contradict itself. So each rank leaves its claim at the store before it arrives;
the rank that arrives last looks at all of them and gives the verdict
(:func:`xffl.cluster.recognition.placement.place_ranks`).
"""

from __future__ import annotations

from dataclasses import replace

from torch.distributed import Store  # type: ignore[attr-defined]

from xffl.cluster.environment import ProcessEnvironment
from xffl.cluster.network import host_identity
from xffl.cluster.recognition.claims import Claim
from xffl.cluster.recognition.placement import place_ranks
from xffl.distributed.consistency import end_on_store
from xffl.errors import LaunchError, XfflError

__all__ = ["PlaceBook", "check_world_size"]


_HEAR_S = 2.0
"""How long rank 0 stays for others to hear of an error, where it is not known how many they are"""


def check_world_size(store: Store, place: ProcessEnvironment, timeout_s: float) -> None:
    """Compare the number of ranks that this one was told with what the first one at a new store was; local.

    Ranks count each other's arrivals, so one with another number would wait for ever, and so would the others.
    """
    first = store.compare_set("xffl_world_size", "", str(place.world_size)).decode()
    if first != str(place.world_size):
        error = LaunchError(
            f"rank {place.rank} was told of {place.world_size} ranks in all, but another one of {first}; set "
            "WORLD_SIZE to the same number on all ranks"
        )
        end_on_store(
            store,
            rank=place.rank,
            world_size=int(first),
            error=error,
            timeout_s=min(timeout_s, _HEAR_S),
            is_speaker=place.rank == 0,
        )


class PlaceBook:
    """The claims of all ranks at the store of a world."""

    def __init__(self, store: Store, place: ProcessEnvironment) -> None:
        self._store = store
        self._place = place

    def claim(self) -> None:
        """Leave this rank's claim; local: two small requests to the store, before this rank arrives."""
        place = self._place
        claim = Claim(
            rank=place.rank,
            local_rank=place.node_local_rank,
            local_size=place.node_local_size,
            host=host_identity(),
            node_rank=place.node_rank,
            node_world_size=place.node_world_size,
            world_size=place.world_size,
        )
        # By the order of arrival, so that a rank that occurs twice is seen.
        number = self._store.add("claims", 1)
        self._store.set(f"claim/{number}", claim.to_text())

    def judge(self) -> XfflError | None:
        """Return what is wrong with the claims of all ranks, or tell each its place; for the rank that arrives last."""
        world_size = self._place.world_size
        names = [f"claim/{number}" for number in range(1, world_size + 1)]
        if not self._store.check(names):
            return LaunchError(
                f"not all of {world_size} ranks have told where they are: some run another version of xffl; install "
                "the same everywhere"
            )
        try:
            claims = [Claim.from_text(text) for text in self._store.multi_get(names)]
            places = place_ranks(claims, world_size)
        except XfflError as wrong:
            return wrong
        if any(None in (claim.local_size, claim.node_rank, claim.node_world_size) for claim in claims):
            self._store.multi_set(  # type: ignore[attr-defined]
                [f"place/{rank}" for rank in places],
                [" ".join(map(str, place)) for place in places.values()],
            )
        return None

    def complete(self) -> ProcessEnvironment:
        """Return this rank's place with what the ranks have found out of it; local, after the verdict."""
        place = self._place
        if None not in (place.node_local_size, place.node_rank, place.node_world_size):
            return place
        local_size, node_rank, nodes = map(int, self._store.get(f"place/{place.rank}").decode().split())
        return replace(place, node_local_size=local_size, node_rank=node_rank, node_world_size=nodes)
