"""``xffl report``: a page with the curves, rounds, traffic and configuration of one run, or of several compared."""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace

from xffl.cli.formatter import HelpFormatter
from xffl.extras import install_command

__all__ = ["build_parser", "run"]

_EXAMPLES = """\
examples:
  xffl report runs/demo
  xffl report runs/fedavg runs/diloco --out runs/compared

It needs matplotlib and jinja2 ({install}). Of a run that is still going on, the page
shows what has been recorded.
"""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        description="Write report.html, one file that needs no network, and its pictures as PNG files: for one run "
        "into its folder pictures/, for several, which are compared, into --out.",
        epilog=_EXAMPLES.format(install=install_command("report")),
        formatter_class=HelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=str, metavar="RUN", help="run folders: output_dir of experiments")
    parser.add_argument("--out", type=str, metavar="FOLDER", help="where to write; needed for several runs")
    return parser


def run(options: Namespace) -> int:
    """Write the report, and print its place and what it lacks."""
    from xffl.run_report import write_report
    from xffl.run_report.summary import printable

    written = write_report(options.runs, options.out)
    print(printable(f"{written.page} and {len(written.pictures)} figures beside it"))
    for one in written.runs:
        for note in one.notes:
            print(printable(f"  {one.name}: {note}"))
    return 0
