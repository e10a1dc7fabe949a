"""Print what ranks of growing worlds do: ``python -m tests.scale --worlds 64,1024,16384 --cells 2,64``."""

from __future__ import annotations

import argparse

from tests.scale.play import play_rank, sampled_ranks
from tests.scale.table import HEADINGS, Row, exponents, measure
from xffl.topology import Topology


def main() -> None:
    """Play the worlds that are asked for, and print a table for each number of cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="64,256,1024,4096,16384", help="ranks of each world, in ascending order")
    parser.add_argument("--cells", default="2,8,64,512", help="numbers of cells")
    parser.add_argument("--hsdp", type=int, help="ranks of a replica; by default a cell holds one copy")
    parser.add_argument("--all", type=int, default=0, metavar="RANKS", help="play all ranks of worlds up to this size")
    options = parser.parse_args()
    for cells in map(int, options.cells.split(",")):
        rows: list[Row] = []
        print(f"\n{cells} cells\n" + " ".join(f"{heading:>13}" for heading in HEADINGS), flush=True)
        for size in map(int, options.worlds.split(",")):
            if size % cells or (options.hsdp and size // cells % options.hsdp):
                continue
            topology = Topology(size, (size // cells,) * cells, options.hsdp)
            plays = [play_rank(topology, rank) for rank in sampled_ranks(topology, options.all)]
            rows.append(measure(topology, plays))
            print(" ".join(f"{value:>13}" for value in rows[-1].shown()), flush=True)
        if len(rows) > 1:
            print(" ".join(f"{value:>13}" for value in ("exponent", *exponents(rows[-2], rows[-1]))), flush=True)


if __name__ == "__main__":
    main()
