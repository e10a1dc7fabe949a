"""How the layers of a model are dealt out to the stages of a pipeline, for ranks and forecasts alike."""

from __future__ import annotations

__all__ = ["layers_of_stages"]


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Deal layers out to the stages of a pipeline, evenly, where the embedding and the head count as a layer each."""
    counts = [1] * stages
    loads = [1 + (stage == 0) + (stage == stages - 1) for stage in range(stages)]
    for _ in range(layers - stages):
        lightest = loads.index(min(loads))
        counts[lightest] += 1
        loads[lightest] += 1
    return counts
