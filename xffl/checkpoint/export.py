"""Export of a checkpoint's model as safetensors files, that transformers and others read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from xffl.checkpoint import format as folders
from xffl.checkpoint.composite import read_boxes
from xffl.checkpoint.contents import model_names
from xffl.checkpoint.format import CellIndex, OpenCheckpoint, Record
from xffl.checkpoint.manager import find_latest_checkpoint
from xffl.checks import integer
from xffl.errors import CheckpointError, ConfigError, ReplacedError
from xffl.extras import optional_import
from xffl.files import naming_errors

__all__ = ["Consolidated", "consolidate_checkpoint"]

MAX_SHARD_BYTES = 5 * 10**9
_GLOBAL = "global"  # what the record of a round over files has among its values
NAME = "model"
CONFIGURATION = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
    *("chat_template.jinja", "preprocessor_config.json"),
)
"""Files beside a model's weights that are copied; none of them is code."""


@dataclass(frozen=True)
class Consolidated:
    """What was written."""

    folder: Path
    cell: int
    """Whose weights it has; of a checkpoint of an elastic run, the cell that saved it"""
    tensors: int
    size_bytes: int
    files: tuple[str, ...]
    ties: dict[str, str]
    """Tensors that were left out since they are another one"""


def consolidate_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    part: str | None = None,
    cell: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    pretrained: str | os.PathLike[str] | None = None,
) -> Consolidated:
    """Write a model of a checkpoint as safetensors, in one process and without a process group.

    The folder holds ``model.safetensors``, or shards of it with ``model.safetensors.index.json``. It takes its name
    when it is whole. Tensors are read one by one, and a shard of them is in memory at a time. Tied tensors are written
    once, under their first name; the others stand in the files' metadata, as ``safetensors.torch.load_model`` wants it.
    No code of the checkpoint is run; all files that are read are compared with their checksums first. All are of one
    save, also where another process replaces or rotates the checkpoint meanwhile: they are held open, and where that
    comes too late, the newest checkpoint is looked for again.

    :param path: The checkpoint's folder; or that of a run, for its newest one, of an elastic run that of the cell with
        the most rounds.
    :param out: The folder to make; it must not exist, or be empty.
    :param part: The model's name among the parts; by default ``model``, and of what ``xffl aggregate`` has made the
        only one, which holds what rounds move.
    :param cell: Whose weights to take; needed with several cells, unless the checkpoint was saved right after a round.
        Of an elastic run's folder it selects the newest checkpoint of that cell.
    :param max_shard_bytes: Bytes of tensors in a file at most; a larger tensor has a file of its own.
    :param pretrained: A folder with ``config.json``, which is copied with the files of the tokenizer, so that
        ``from_pretrained`` reads the result.
    :return: What was written.
    :raises ConfigError: if an argument is invalid, safetensors is not installed, or cells of an elastic run have made
        as many rounds without each other.
    :raises CheckpointError: if the checkpoint cannot be trusted or has no such model.
    """
    with optional_import("safetensors", "consolidating needs safetensors"):
        import safetensors.torch  # noqa: F401 - used below
    integer("max_shard_bytes", max_shard_bytes)
    target, configuration = folders.check_path(out), _check_pretrained(pretrained)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists already; give a folder that does not, or an empty one")
    place = folders.check_path(path)
    number = None if cell is None else integer("cell (--cell)", cell, 0)

    def write_one_save() -> Consolidated:
        of_cell = None if number is None else _find_of_cell(place, number)
        name = of_cell or _find(place)
        with _opened(name, place) as source, source.noticing_replacement():
            return _consolidate(
                source=source,
                part=part,
                cell=number,
                is_of_cell=of_cell is not None,
                target=target,
                configuration=configuration,
                max_shard_bytes=max_shard_bytes,
            )

    return folders.read_again_if_replaced(write_one_save)


def _opened(name: Path, place: Path) -> OpenCheckpoint:
    """Open the checkpoint that was found in a run's folder, which rotation may have deleted since it was found."""
    try:
        return OpenCheckpoint(name)
    except CheckpointError as error:
        if name == place:
            raise
        raise ReplacedError(f"{error}; another process has deleted it after it was found in {place}") from error


def _consolidate(
    source: OpenCheckpoint,
    part: str | None,
    cell: int | None,
    is_of_cell: bool,
    target: Path,
    configuration: list[Path],
    max_shard_bytes: int,
) -> Consolidated:
    """Write a model of the checkpoint that is held open; ``is_of_cell`` if it was found in a cell's own run."""
    folder, record = source.path, source.read_record()
    if part is None:
        part = record.parts[0] if _GLOBAL in record.values else "model"
    number = _check_cell(folder, record, None if is_of_cell else cell)
    index = folders.read_index(source, record, number)
    names = _names(folder, record, index, part)
    folders.check_data(index)
    shards = _shards(index, names, max_shard_bytes)
    own_ties = [pair for pair in index.ties.items() if pair[0].startswith(f"{part}/")]
    ties = {tied.removeprefix(f"{part}/"): first.removeprefix(f"{part}/") for tied, first in own_ties}
    try:
        with folders.partial_folder(target) as partial:
            files = _write_shards(partial, index=index, shards=shards, part=part, ties=ties)
            for file in configuration:
                shutil.copyfile(file, partial / file.name)
            folders.sync_all(partial)
            folders.replace_folder(target)
    except CheckpointError:
        raise
    except Exception as error:  # safetensors raises a KeyError where it has no name for a data type
        raise CheckpointError(
            f"{target} cannot be written: {type(error).__name__}: {error}; see that there is space, and that "
            "safetensors knows the tensors' data types"
        ) from error
    lone = record.values.get("cell") if len(record.cells) == 1 else None
    shown = cell if is_of_cell and cell is not None else number if lone is None else int(lone)
    return Consolidated(
        target, cell=shown, tensors=len(names), size_bytes=_bytes(index, names), files=tuple(files), ties=ties
    )


def _find(path: Path) -> Path:
    """Return the checkpoint that a path stands for: itself, or the newest of the run whose folder it is."""
    if folders.find_record(path) is not None:
        return path
    if (newest := find_latest_checkpoint(path)) is not None:
        return newest
    of_cells = [one for cell in path.glob("cell_*") if (one := find_latest_checkpoint(cell)) is not None]

    records = {one: record for one in of_cells if (record := folders.find_record(one)) is not None}

    def rank(checkpoint: Path) -> tuple[int, bool, str]:
        record = records[checkpoint]
        return int(record.values.get("round", -1)), record.after_round, record.saved_at

    known = [one for one in records if rank(one)[0] >= 0]
    if not known:
        return path
    found = max(known, key=rank)
    most = [one for one in known if rank(one)[:2] == rank(found)[:2]]
    if rank(found)[1] and len({records[one].values.get("lineage") for one in most}) > 1:
        raise ConfigError(
            f"{path} has several models of {rank(found)[0]} rounds, since its cells made rounds without each other; "
            f"give one of {', '.join(sorted(map(str, most)))}"
        )
    return found


def _find_of_cell(path: Path, cell: int) -> Path | None:
    """Return the newest checkpoint of a cell in the folder of an elastic run; ``None`` for any other folder."""
    runs = [one for one in sorted(path.glob("cell_*")) if one.is_dir() and not (one / folders.INDEX).exists()]
    if not runs or find_latest_checkpoint(path) is not None:
        return None
    newest = find_latest_checkpoint(own := path / f"cell_{cell}")
    if newest is None:
        others = [one.name for one in runs if find_latest_checkpoint(one) is not None]
        where = f"{path} has those of {', '.join(others)}" if others else f"nor in any other folder of {path}"
        raise CheckpointError(f"there is no checkpoint in {own}; {where}")
    return newest


def _write_shards(
    folder: Path, index: CellIndex, shards: list[list[str]], part: str, ties: dict[str, str]
) -> list[str]:
    """Write the files, and where there are several an index of which tensor is in which."""
    from safetensors.torch import save_file

    files: list[str] = []
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"{NAME}.safetensors" if len(shards) == 1 else f"{NAME}-{number + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {name.removeprefix(f"{part}/"): folders.read_tensor(index, name) for name in names}
        with naming_errors(folder / file):
            save_file(tensors, folder / file, metadata={"format": "pt", **ties})
        places |= dict.fromkeys(tensors, file)
        files.append(file)
    if len(shards) > 1:
        size = _bytes(index, (name for names in shards for name in names))
        index_text = json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2)
        files.append(f"{NAME}.safetensors.index.json")
        folders.write_text(folder / files[-1], index_text + "\n")
    return files


def _shards(index: CellIndex, names: list[str], max_bytes: int) -> list[list[str]]:
    """Cut the tensors into files, in their order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in names:
        size = _bytes(index, [name])
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _bytes(index: CellIndex, names: Iterable[str]) -> int:
    return sum(index.tensors[name].shape.numel() * index.tensors[name].dtype.itemsize for name in names)


def _names(folder: Path, record: Record, index: CellIndex, part: str) -> list[str]:
    """Return the tensors of a model, but for tied ones after the first."""
    if part not in record.parts:
        raise CheckpointError(f"checkpoint {folder} has the parts {sorted(record.parts)}, not {part!r}; name one")
    if _GLOBAL in record.values:
        return [name for name in index.tensors if name.startswith(f"{part}/") and name not in index.ties]
    held = model_names(part, index.tensors, index.values)
    if composites := [(name, boxes[0]) for name, boxes in read_boxes(index.values).items() if name in held]:
        name, box = composites[0]
        raise CheckpointError(
            f"{name!r} of checkpoint {folder} is {box.class_name}, a tensor made of others, which safetensors does not "
            "keep; load the checkpoint and make the model's tensors plain ones"
        )
    untied = index.tensors.keys() - index.ties
    names = [name for name in held if name in untied]
    values = [name for name in index.values if name.startswith(f"{part}/group/")]
    if part in index.values or values or not names:
        raise CheckpointError(
            f"part {part!r} of checkpoint {folder} is no model; name a model among the parts {sorted(record.parts)}"
        )
    return names


def _check_cell(folder: Path, record: Record, cell: int | None) -> int:
    cells = len(record.cells)
    if cell is not None:
        if cells == 1 and cell == record.values.get("cell"):  # of an elastic run, by its number there
            return 0
        return integer(f"cell of checkpoint {folder}", cell, 0, cells - 1)
    if cells > 1 and not record.after_round:
        raise ConfigError(
            f"checkpoint {folder} is of {cells} cells and was not saved right after a round, so each holds other "
            f"weights; name one with cell (--cell), 0 to {cells - 1}"
        )
    return 0


def _check_pretrained(pretrained: str | os.PathLike[str] | None) -> list[Path]:
    """Return the files to copy."""
    if pretrained is None:
        return []
    folder = Path(pretrained)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"pretrained {folder} has no config.json; give the folder of a transformers model")
    return [folder / name for name in CONFIGURATION if (folder / name).is_file()]
