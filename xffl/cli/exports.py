"""Commands on exported and saved models, each in one process: ``xffl aggregate`` and ``xffl consolidate``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jsonargparse import ArgumentParser, Namespace

from xffl.checks import real
from xffl.cli.main import command_parser
from xffl.cli.numbers import size_in
from xffl.cli.terminal import drawn_on
from xffl.errors import ConfigError
from xffl.extras import install_command

__all__ = ["COMMANDS"]

_AGGREGATE_EXAMPLES = """\
examples:
  xffl aggregate cell_0/round_3 cell_1/round_3 --out global/round_3
  xffl aggregate cell_*/round_3 --out global/round_3 --weights 3,1
  xffl aggregate cell_*/round_3 --out global/round_3 --server diloco --state server
  xffl aggregate cell_*/round_3 --out global/round_3 --combine trimmed_mean:share=0.2 --dry-run
"""

_CONSOLIDATE_EXAMPLES = """\
examples:
  xffl consolidate runs/demo/checkpoints/final model
  xffl consolidate runs/demo/checkpoints/step_100 model --cell 1
  xffl consolidate runs/demo model
  xffl consolidate runs/llama/checkpoints/final model --pretrained llama
"""


def _parse_aggregate() -> ArgumentParser:
    parser = command_parser(
        "Make a round from the exports of all cells in this process, with the same bits as over a network.",
        _AGGREGATE_EXAMPLES,
    )
    parser.add_argument("exports", nargs="+", type=str, metavar="EXPORT", help="folder with the export of a cell")
    parser.add_argument("--out", type=str, required=True, help="folder to create; that of an earlier round is replaced")
    weights = "weight of each cell (default: as the cells counted)"
    parser.add_argument("--weights", type=str, metavar="W,W", help=weights)
    combine = (
        "how values are combined, see xffl list algorithms, or package.module.name of your own, found by PYTHONPATH "
        "(default: as the cells say)"
    )
    parser.add_argument("--combine", type=str, help=combine)
    server = "server optimizer, such as fedadam:lr=0.03 or diloco (default: as the cells say); needs --state"
    parser.add_argument("--server", type=str, help=server)
    parser.add_argument("--state", type=str, metavar="DIR", help="folder for its state from round to round")
    parser.add_argument("--start", type=str, metavar="DIR", help="for its first round: the result of round 0")
    dry = "check everything, say what would be written, and write nothing"
    parser.add_argument("--dry-run", action="store_true", help=dry)
    return parser


def _aggregate(options: Namespace) -> int:
    """Make the round."""
    from xffl.aggregation.offline import aggregate_exports

    weights = None if options.weights is None else [_weight(text) for text in options.weights.split(",")]
    given = {name: options[name] for name in ("combine", "server", "state", "start")}
    with _bar() as progress:
        given |= {"weights": weights, "is_tried": options.dry_run, "progress": progress}
        made = aggregate_exports(options.exports, options.out, **given)
    for difference in made.differences:
        print(f"xffl: {difference}", file=sys.stderr)
    shares = ", ".join(f"cell {cell} {share:.1%}" for cell, share in enumerate(made.shares))
    would = "is already " if made.was_there else "would be " if options.dry_run else ""
    print(f"{options.out}: {would}round {made.number} of {shares}: {made.tensors} tensors, {made.size_bytes} bytes")
    return 0


def _weight(text: str) -> float:
    weight = real(text)
    if weight is None:
        raise ConfigError(f"--weights must be a number for each cell, such as 3,1, got {text!r}")
    return weight


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
    with Progress(*columns, console=Console(file=drawn_on(sys.stderr)), transient=True) as shown:

        def tell(stage: str, done: int, size: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=size)
            shown.update(tasks[stage], completed=done)

        yield tell


def _parse_consolidate() -> ArgumentParser:
    parser = command_parser(
        "Write a model of a checkpoint as safetensors, in this one process: model.safetensors, or shards "
        f"of it with an index. Needs safetensors ({install_command('safetensors')}).",
        _CONSOLIDATE_EXAMPLES,
    )
    parser.add_argument("checkpoint", type=str, metavar="CHECKPOINT", help="folder of the checkpoint, or of a run")
    parser.add_argument("out", type=str, metavar="OUT", help="folder to create")
    part = "name of the model among the checkpoint's parts (default: model)"
    parser.add_argument("--part", type=str, metavar="NAME", help=part)
    cell = (
        "take the weights of this cell; required if cells differ (the checkpoint was not saved after a round); of an "
        "elastic run's folder, the newest checkpoint in cell_N (default: that of the cell with the most rounds)"
    )
    parser.add_argument("--cell", type=int, metavar="N", help=cell)
    size = "maximum size of a file, in bytes of tensors"
    parser.add_argument("--max-shard-bytes", type=size_in(1), default=5e9, metavar="BYTES", help=size)
    pretrained = "folder with config.json, copied for from_pretrained"
    parser.add_argument("--pretrained", type=str, metavar="DIR", help=pretrained)
    return parser


def _consolidate(options: Namespace) -> int:
    """Write the model."""
    from xffl.checkpoint.export import consolidate_checkpoint

    size = options.max_shard_bytes  # such as 5e9; what is no size is refused where it is used
    done = consolidate_checkpoint(
        options.checkpoint,
        options.out,
        part=options.part,
        cell=options.cell,
        max_shard_bytes=int(size) if abs(size) < 1e18 else 0,
        pretrained=options.pretrained,
    )
    tied = f", {len(done.ties)} tied ones left out" if done.ties else ""
    size_text = f"{done.size_bytes} bytes of cell {done.cell}"
    print(f"{done.folder}: {done.tensors} tensors{tied}, {size_text}, {', '.join(done.files)}")
    return 0


COMMANDS = {"aggregate": (_parse_aggregate, _aggregate), "consolidate": (_parse_consolidate, _consolidate)}
"""For each command what makes its parser, and what runs it and returns an exit code."""
