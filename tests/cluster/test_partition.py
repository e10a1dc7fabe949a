"""Elastic cells on hosts between which the network breaks (tests/chaos/partition.py): who goes on, and what is lost."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.chaos.jobs import Jobs
from tests.chaos.partition import federation_on, missed, network, run
from tests.chaos.storm import Job
from tests.cluster.hosts import Hosts

pytestmark = [pytest.mark.alone, pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")]


SHORT = Job(cells=3, ranks=1, every=40, step_s=0.05)
"""Rounds of a third of the bytes: at a tenth of the rate they take 5 s."""


@pytest.fixture(scope="module")
def running(
    slow_link: None, base_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Hosts, Jobs]]:
    """Give the hosts, and three cells that run on them; what one test has broken is whole again for the next."""
    folder = tmp_path_factory.mktemp("partition")
    with network(base_environ, folder / "net") as hosts, federation_on(hosts, folder, SHORT, 400) as federation:
        yield hosts, federation


@pytest.mark.parametrize(("name", "seconds"), [("link down", 15), ("a tenth", 0), ("host gone", 0)])
def test_rounds_on_a_network_that_breaks(name: str, seconds: float, running: tuple[Hosts, Jobs]) -> None:
    hosts, federation = running
    result = run(name, federation, hosts, seconds)
    assert not missed(result), (result, (federation.folder / "output.log").read_text())
