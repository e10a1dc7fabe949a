"""What tells a job its hosts and its ranks their places: files of PBS and LSF, variables of launchers, claims."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.inputs.parser import Parser
from tests.chaos.inputs.parsers_launch import environment_of
from tests.unit.test_launchers import MEETING, RECORDED
from xffl.cluster.batch import find_job
from xffl.cluster.environment import detect_environment
from xffl.cluster.launch.job_layout import fit_hosts
from xffl.cluster.recognition.claims import Claim
from xffl.cluster.recognition.launchers import LAUNCHERS
from xffl.cluster.recognition.placement import place_ranks, read_claim

LISTS = (
    b"LSB_JOBID=7\nLSB_MCPU_HOSTS=a 4 b 4\n",
    b"LSB_JOBID=7\nLSB_HOSTS=a a b b\nLSB_MCPU_HOSTS=a 2 b 2\n",
)


def variables(folder: Path) -> list[bytes]:
    """Return the variables of one rank of each launcher that tells enough, with the address at which ranks meet."""
    sets = ({**RECORDED[row.name], **MEETING} for row in LAUNCHERS if row.is_told)
    return ["".join(f"{name}={text}\n" for name, text in own.items()).encode() for own in sets]


def read_variables(content: bytes, folder: Path) -> None:
    # The address of the meeting stays, or the ranks would agree on one over MPI.
    detect_environment({**environment_of(content), **MEETING})


def read_file(content: bytes, folder: Path) -> None:
    (folder / "nodes").write_bytes(content)
    read_job({"PBS_JOBID": "7", "PBS_NODEFILE": str(folder / "nodes")})


def read_job(environ: dict[str, str]) -> None:
    job = find_job(environ)
    if job is not None:
        fit_hosts(job, 4, environ={})


def read_claims(content: bytes, folder: Path) -> None:
    claims = [read_claim(content), Claim(1, 1, 2, "a", 0, 1, 2)]
    place_ranks(claims, 2)


PARSERS = (
    Parser("batch: file of hosts", "text", lambda folder: [b"a\na\nb\nb\n"], read_file),
    Parser(
        name="batch: lists of hosts",
        form="text",
        examples=lambda folder: list(LISTS),
        read=lambda content, folder: read_job(environment_of(content)),
    ),
    Parser("launch: launchers", "text", variables, read_variables),
    Parser("launch: claims", "json", lambda folder: [Claim(0, 0, 2, "a", 0, 1, 2).to_text().encode()], read_claims),
)
