"""``xffl aggregate``: make a round of what cells have exported that no network joins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jsonargparse import ArgumentParser, Namespace

from xffl.cli.formatter import HelpFormatter
from xffl.errors import ConfigError

__all__ = ["build_parser", "run"]

_EXAMPLES = """\
examples:
  xffl aggregate cell_0/round_3 cell_1/round_3 --out global/round_3
  xffl aggregate cell_*/round_3 --out global/round_3 --weights 3,1
  xffl aggregate cell_*/round_3 --out global/round_3 --server diloco --state server
  xffl aggregate cell_*/round_3 --out global/round_3 --combine trimmed_mean:trim=1 --dry-run
"""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        description="Make a round of the exports of all cells, in this one process: the same bits as over a network.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("exports", nargs="+", type=str, metavar="EXPORT", help="folder that a cell has exported")
    parser.add_argument("--out", type=str, required=True, help="folder to make; one of an earlier round is replaced")
    parser.add_argument("--weights", type=str, metavar="W,W", help="what each cell counts for (default: as it counted)")
    parser.add_argument(
        "--combine", type=str, help="how values are combined (xffl list algorithms); default: as the cells say"
    )
    server = "server optimizer, such as fedadam:lr=0.03 or diloco (default: as the cells say); needs --state"
    parser.add_argument("--server", type=str, help=server)
    parser.add_argument("--state", type=str, metavar="DIR", help="where its state goes from round to round")
    parser.add_argument("--start", type=str, metavar="DIR", help="for its first round: what round 0 was made into")
    parser.add_argument("--dry-run", action="store_true", help="check all, say what would be made, and write nothing")
    return parser


def run(options: Namespace) -> int:
    """Make the round.

    :param options: What :func:`build_parser` parses.
    :return: Exit code 0.
    :raises ConfigError: if an option cannot be meant.
    :raises CheckpointError: if an export cannot be trusted, or the exports do not go together.
    """
    from xffl.aggregation.offline import aggregate_exports

    weights = None if options.weights is None else [_weight(text) for text in options.weights.split(",")]
    with _bar() as progress:
        made = aggregate_exports(
            options.exports,
            options.out,
            weights=weights,
            combine=options.combine,
            server=options.server,
            state=options.state,
            start=options.start,
            is_tried=options.dry_run,
            progress=progress,
        )
    shares = ", ".join(f"cell {cell} {share:.1%}" for cell, share in enumerate(made.shares))
    would = "is already " if made.was_there else "would be " if options.dry_run else ""
    print(f"{options.out}: {would}round {made.number} of {shares}: {made.tensors} tensors, {made.size_bytes} bytes")
    return 0


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--weights has {text!r}, which is no number; give one for each cell, such as 3,1") from None


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """Show how far it is, where somebody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:

        def tell(stage: str, done: int, size: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=size)
            shown.update(tasks[stage], completed=done)

        yield tell
