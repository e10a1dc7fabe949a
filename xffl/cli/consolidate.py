"""``xffl consolidate``: write a model of a checkpoint as safetensors."""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace

from xffl.cli.formatter import HelpFormatter
from xffl.extras import install_command

__all__ = ["build_parser", "run"]

_EXAMPLES = """\
examples:
  xffl consolidate runs/demo/checkpoints/final model
  xffl consolidate runs/demo/checkpoints/step_100 model --cell 1
  xffl consolidate runs/llama/checkpoints/final model --pretrained llama
"""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        description="Write a model of a checkpoint as safetensors, in this one process: model.safetensors, or shards "
        f"of it with an index. Needs safetensors ({install_command('safetensors')}).",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("checkpoint", type=str, help="folder of the checkpoint")
    parser.add_argument("out", type=str, help="folder to make")
    parser.add_argument("--part", type=str, help="name of the model among the checkpoint's parts (model)")
    parser.add_argument("--cell", type=int, help="whose weights; needed where cells differ (not saved after a round)")
    parser.add_argument("--max-shard-bytes", type=float, default=5e9, help="bytes of tensors in a file, at most")
    parser.add_argument("--pretrained", type=str, help="folder with config.json, copied for from_pretrained")
    return parser


def run(options: Namespace) -> int:
    """Write the model.

    :param options: What :func:`build_parser` parses.
    :return: Exit code 0.
    :raises ConfigError: if an option cannot be meant.
    :raises CheckpointError: if the checkpoint cannot be trusted or has no such model.
    """
    from xffl.checkpoint.export import consolidate_checkpoint

    done = consolidate_checkpoint(
        options.checkpoint,
        options.out,
        part=options.part,
        cell=options.cell,
        max_shard_bytes=_whole(options.max_shard_bytes),
        pretrained=options.pretrained,
    )
    tied = f", {len(done.ties)} tied ones left out" if done.ties else ""
    print(
        f"{done.folder}: {done.tensors} tensors{tied}, {done.size_bytes} bytes of cell {done.cell}, "
        f"{', '.join(done.files)}"
    )
    return 0


def _whole(size: float) -> int:
    """Return a size such as 5e9 as a whole number; what is none is refused where it is used."""
    return int(size) if size == size and abs(size) < 1e18 else 0
