"""What the rank that arrives last at a meeting makes of the claims of all."""

from __future__ import annotations

from torch.distributed import Store  # type: ignore[attr-defined]

from xffl.cluster.recognition.placement import place_ranks, read_claim
from xffl.errors import LaunchError, XfflError

__all__ = ["judge_claims"]


def judge_claims(store: Store, world_size: int) -> XfflError | None:
    """Tell each rank its place, where its launcher has not; local.

    :param store: The store at which the ranks meet, with their claims.
    :param world_size: How many there are.
    :return: What is wrong with the claims; ``None`` where nothing is.
    """
    names = [f"claim/{number}" for number in range(1, world_size + 1)]
    if not store.check(names):
        return LaunchError(
            f"not all of {world_size} ranks have told where they are: some run another version of xffl; install "
            "the same everywhere"
        )
    try:
        claims = [read_claim(text) for text in store.multi_get(names)]
        places = place_ranks(claims, world_size)
    except XfflError as wrong:
        return wrong
    if any(None in (claim.local_size, claim.node_rank, claim.node_world_size) for claim in claims):
        store.multi_set(  # type: ignore[attr-defined]
            [f"place/{rank}" for rank in places],
            [" ".join(map(str, place)) for place in places.values()],
        )
    return None
