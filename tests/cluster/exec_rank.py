"""What each rank of the launcher's tests does: write down where it is and what it got, then end as it is told to.

No torch, so that a start costs little. ``exec_rank.py FOLDER WAY RANK [anything]``: the rank ends in that way.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from xffl.cluster.environment import detect_environment

NAMES = ("XFFL_FEDERATED", "XFFL_HSDP", "XFFL_HOST", "XFFL_RUNNER", "SLURMD_NODENAME", "MASTER_ADDR", "MASTER_PORT")

LEAVING = (signal.SIGUSR2, signal.SIGTERM)


def leave(number: int, frame: object) -> None:
    for other in LEAVING:  # a rank that is on its way may be asked again
        signal.signal(other, signal.SIG_IGN)
    print("asked to leave by", signal.Signals(number).name)
    sys.exit(75)


def wait_for(files: list[Path]) -> None:
    """Wait until all ranks have spoken: the others are ended as soon as this one fails."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not all(file.exists() for file in files):
        time.sleep(0.02)


def main(folder: str, way: str, which: str) -> None:
    place = detect_environment()
    if way == "leave":
        for number in LEAVING:
            signal.signal(number, leave)
    told = {"rank": place.rank, "argv": sys.argv, "cwd": os.getcwd(), "pid": os.getpid(), "node": place.node_rank}
    told |= {name: os.environ.get(name) for name in NAMES}
    part = Path(folder, f"told.{place.rank}.part")
    part.write_text(json.dumps(told))
    part.rename(Path(folder, f"told.{place.rank}"))
    print("hello from", place.rank)
    print("trouble at", place.rank, file=sys.stderr)
    if way == "end":
        return
    Path(folder, f"{way}.{place.rank}").touch()
    if place.rank == int(which):
        wait_for([Path(folder, f"{way}.{rank}") for rank in range(place.world_size)])
        if way == "raise":
            raise ValueError("seven years " + "of luck" * 300)
        if way == "lost":
            raise RuntimeError("[gloo] Connection closed by peer")
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "exit":
            os._exit(17)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:4])
