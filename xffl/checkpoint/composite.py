"""Composite tensors in a checkpoint: tensors of a class that holds its values in other tensors and a context.

Low-bit states of optimizers are of this kind (torchao: codes, scales and a table for each block of values), also as the
local part of a DTensor. torch calls such a class a traceable wrapper subclass: ``__tensor_flatten__`` gives the names
of the inner tensors and the context, and ``__tensor_unflatten__`` makes the tensor of them. A checkpoint keeps the
inner tensors as they are and the context as plain values, so nothing is rounded and no code of a file is run. A class
that a checkpoint names is called only if the program vouches for it: it is the class of the tensor that is filled or
replaced, or one that was given to ``torch.serialization.add_safe_globals``, as torchao does with its own.

The inner tensors of different ranks are not parts of one larger tensor (each has its own scales). So each rank's box of
the whole tensor is kept by itself, under a name with its offsets and sizes. A rank with the same box reads exactly what
was saved. Any other box is put together from rows of those saved, by the class's own slicing, and only if this is shown
to be exact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from xffl.checkpoint.tables import read_counts
from xffl.checks import shown
from xffl.distributed.replicas.plain_values import Plain, from_plain, tensors_named, to_plain
from xffl.distributed.values.sharding import bytes_of, dtype_of
from xffl.distributed.values.spread_like import spread_as, spread_whole
from xffl.errors import CheckpointError, ConfigError

__all__ = ["Box", "box_of", "copy_inner", "is_composite", "read_boxes", "restore", "take_apart"]

PREFIX = "/boxes/"  # no part's name is empty, so nothing else in a checkpoint has a name like this

Inner = dict[str, Any]
"""A tensor as plain values: the name of a plain one, or class, inner tensors, context, size and stride of another."""


@dataclass(frozen=True)
class Box:
    """What one rank has saved of a tensor: the elements from ``offsets`` on, ``sizes`` of them along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: torch.Size  # of the whole tensor
    dtype: torch.dtype
    inner: Inner

    @property
    def class_name(self) -> str | None:
        """Name of the class; ``None`` for a plain tensor, as ranks with few elements may hold."""
        return self.inner.get("class")

    @property
    def tensor_names(self) -> list[str]:
        """Names of the tensors that the checkpoint holds for this box."""
        return list(tensors_named(self.inner))


def is_composite(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor, or this rank's part of one that is spread, is made of other tensors; local."""
    local = _local_part(tensor)
    is_flattened = hasattr(local, "__tensor_flatten__") and hasattr(type(local), "__tensor_unflatten__")
    return is_flattened and local.layout == torch.strided


def take_apart(path: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Plain]]:
    """Return the inner tensors of this rank's box by name, and the plain values that describe it; local.

    :param path: Name of the tensor.
    :param tensor: A composite tensor, or a plain one that is composite on other ranks.
    :return: Inner tensors, and descriptions for the cell's index.
    :raises ConfigError: if the tensor could not be put together again from what is kept.
    """
    tensors: dict[str, torch.Tensor] = {}
    offsets, sizes = box_of(tensor)
    if 0 in sizes:
        return {}, {}
    name = f"{PREFIX}{path}/{','.join(map(str, offsets))}/{','.join(map(str, sizes))}"
    described: dict[str, Plain] = {
        "path": path,
        "offsets": list(offsets),
        "sizes": list(sizes),
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "inner": _describe(path, _local_part(tensor), name, tensors),
    }
    return tensors, {name: described}


def read_boxes(values: Mapping[str, Plain]) -> dict[str, list[Box]]:
    """Return the boxes among the plain values of a cell's index, by the tensor's name; pure.

    :param values: The values, of which others than boxes are left alone.
    :return: Boxes by the tensor's name.
    :raises CheckpointError: if a box is not of the form that is written.
    """
    boxes: dict[str, list[Box]] = {}
    for key, value in values.items():
        if key.startswith(PREFIX) and isinstance(value, dict):
            try:
                path, box = _read_box(value)
            except ValueError as error:
                raise CheckpointError(
                    f"{shown(key)} is no box of a tensor: {error}; the checkpoint is damaged, load another one"
                ) from error
            boxes.setdefault(path, []).append(box)
    return boxes


def _read_box(value: dict[str, Any]) -> tuple[str, Box]:
    """Return a box and the name of its tensor; a ValueError says what is wrong."""
    path: Any = value.get("path")
    inner: Any = value.get("inner")
    if not isinstance(path, str):
        raise ValueError(f"path must be a text, got {shown(path)}")
    counts = {name: read_counts(value.get(name), name) for name in ("offsets", "sizes", "shape")}
    if len(set(map(len, counts.values()))) > 1 or any(
        start + size > whole for start, size, whole in zip(*counts.values(), strict=True)
    ):
        raise ValueError(f"it leaves its tensor: {counts}")
    _check_inner(inner)
    dtype = dtype_of(value.get("dtype"))
    return path, Box(
        counts["offsets"], sizes=counts["sizes"], shape=torch.Size(counts["shape"]), dtype=dtype, inner=inner
    )


def _check_inner(inner: Any) -> None:
    """Refuse what does not describe a tensor, without a look at its class; a ValueError says what is wrong."""
    if not isinstance(inner, dict):
        raise ValueError(f"inner must be a mapping, got {shown(inner)}")
    if "class" not in inner:
        if inner.keys() != {"__tensor__"} or not isinstance(inner["__tensor__"], str):
            raise ValueError(f"a plain tensor must have a name, got {shown(inner)}")
        return
    if not isinstance(inner["class"], str) or not isinstance(inner.get("inner"), dict):
        raise ValueError(f"a tensor must have a class and tensors in it, got {shown(inner)}")
    if "context" not in inner:
        raise ValueError(f"a tensor must have a context, got {shown(inner)}")
    for name in ("size", "stride"):
        read_counts(inner.get(name), name)
    for one in inner["inner"].values():
        _check_inner(one)


def box_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of this rank's part of a tensor; local."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    # What torch.distributed.checkpoint asks of a DTensor, too. A rank without elements has no box, or an empty one.
    spread: Any = tensor.detach()
    chunks = spread.__create_chunk_list__()
    if not chunks:
        return (0,) * tensor.ndim, tuple(_local_part(tensor).shape)
    if len(chunks) > 1:
        raise ConfigError(
            f"a tensor of shape {tuple(tensor.shape)} with the placements {tensor.placements} lies in {len(chunks)} "
            "boxes on this rank; a composite tensor is kept as one, so spread the model along its first dimension only"
        )
    return tuple(chunks[0].offsets), tuple(chunks[0].sizes)


def restore(
    path: str,
    boxes: Sequence[Box],
    like: torch.Tensor | None,
    read: Callable[[str], torch.Tensor],
    device: torch.device | None = None,
    *,
    replaced: torch.Tensor | None = None,
) -> torch.Tensor:
    """Make a tensor of the boxes that were saved of it; local.

    :param path: Name of the tensor, for messages.
    :param boxes: All boxes of it that the checkpoint has.
    :param like: A tensor of the same shape (the one to replace, or the parameter) that shows which part of it this rank
        holds, and where; ``None`` for the whole.
    :param read: Returns a tensor of the checkpoint by name, on the CPU.
    :param device: Where the whole goes; ``None`` for the CPU.
    :param replaced: The tensor whose place it takes, whatever its shape; its classes may be made, as those of ``like``.
    :return: The tensor, spread as ``like`` is.
    :raises CheckpointError: if there is no such box, and it cannot be made of others exactly; or if nobody vouches for
        its class.
    """
    kinds = kinds_in(like) | kinds_in(replaced)
    whole = boxes[0]
    offsets, sizes = ((0,) * len(whole.shape), tuple(whole.shape)) if like is None else box_of(like)
    if like is not None:
        device = _local_part(like).device
    same = [box for box in boxes if (box.offsets, box.sizes) == (offsets, sizes)]
    if 0 in sizes:
        local = torch.empty(sizes, dtype=whole.dtype, device="cpu")
    elif same:
        local = _make_box(path, same[0], read, kinds)
    else:
        local = _join(path=path, boxes=boxes, offsets=offsets, sizes=sizes, read=read, kinds=kinds)
    local = local if device is None else _move(local, device)
    if not isinstance(like, DTensor):
        return local
    spread: Any = like
    if like.dtype != whole.dtype:
        spread = torch.empty_like(like, dtype=whole.dtype, requires_grad=False)
    return spread_as(local, spread)


def spread_everywhere(values: torch.Tensor, beside: DTensor) -> DTensor:
    """Return a whole composite tensor as one that each rank of another one's mesh holds; nothing moves."""
    plain = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    return spread_as(values, spread_whole(plain, beside))


def copy_inner(target: torch.Tensor, source: torch.Tensor) -> None:
    """Write the inner tensors of one tensor into those of another of the same class and context; local."""
    mine, its = _local_part(target), _local_part(source)
    if not is_composite(mine):
        mine.copy_(its)
        return
    names, _ = mine.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        copy_inner(getattr(mine, name), getattr(its, name))


def difference(target: torch.Tensor, made: torch.Tensor) -> str | None:
    """Return how a tensor that is to be filled differs from what was made to fill it; ``None`` where it fits; local."""
    mine, its = _local_part(target), _local_part(made)
    if _class_name(mine) != _class_name(its):
        return f"{_class_name(its) or 'a plain tensor'} in it, here {_class_name(mine) or 'a plain tensor'}"
    if not is_composite(mine):
        return None if mine.shape == its.shape and mine.dtype == its.dtype else "made of other tensors in it than here"
    names, here = mine.__tensor_flatten__()  # type: ignore[attr-defined]
    others, saved = its.__tensor_flatten__()  # type: ignore[attr-defined]
    if list(names) != list(others) or not _is_equal(here, saved):
        return f"{_class_name(its)} with {saved} in it, here with {here}"
    return next(filter(None, (difference(getattr(mine, one), getattr(its, one)) for one in names)), None)


def kinds_in(tensor: torch.Tensor | None) -> set[type]:
    """Return the classes that a tensor is made of, its own and those of its inner ones; none of a plain one; local."""
    if tensor is None or not is_composite(tensor):
        return set()
    local = _local_part(tensor)
    names, _ = local.__tensor_flatten__()  # type: ignore[attr-defined]
    return {type(local)}.union(*(kinds_in(getattr(local, name)) for name in names))


def class_name(tensor: torch.Tensor) -> str | None:
    """Return the name of the class of this rank's part, as a checkpoint has it; ``None`` of a plain one; local."""
    return _class_name(_local_part(tensor))


def find_class(name: str, kinds: Collection[type]) -> Any:
    """Return the tensor class of a name, if the program vouches for it; nothing is imported for a checkpoint.

    :param name: The name that a checkpoint has.
    :param kinds: Classes of the tensor that is to be filled or replaced.
    :return: The class, one of these or of ``torch.serialization.get_safe_globals``.
    :raises CheckpointError: if it is none of them.
    """
    safe = [one[0] if isinstance(one, tuple) else one for one in torch.serialization.get_safe_globals()]
    for kind in (*kinds, *safe):
        if isinstance(kind, type) and issubclass(kind, torch.Tensor) and _title(kind) == name:
            return kind
    if not any(_title(kind) == name for kind in _subclasses(torch.Tensor)):
        raise CheckpointError(
            f"the checkpoint has tensors of the class {name[:200]}, which this process has not imported; import the "
            f"package that has it ({name.partition('.')[0][:100]}) before loading"
        )
    raise CheckpointError(
        f"the checkpoint has tensors of the class {name[:200]}, whose code would be called to make them, and the "
        "tensors here are of other classes; if the checkpoint may have it, give the class to "
        "torch.serialization.add_safe_globals before loading; nothing was loaded"
    )


# Taking apart and putting together ------------------------------------------------------------------------------------


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # with gradients to_local makes a view, in which a class may forget its data type
        local: torch.Tensor = tensor.to_local()
    return local


def _title(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_name(tensor: torch.Tensor) -> str | None:
    return _title(type(tensor)) if is_composite(tensor) else None


def _subclasses(kind: type) -> Iterator[type]:
    children: list[type] = kind.__subclasses__()
    for child in children:
        yield child
        yield from _subclasses(child)


def _describe(path: str, tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> Plain:
    """Write a tensor as plain values; its plain inner tensors are put aside by name."""
    if not is_composite(tensor):
        if isinstance(tensor, DTensor) or tensor.layout != torch.strided or tensor.is_meta:
            raise ConfigError(
                f"tensor {path!r} has an inner tensor {name.rpartition('/')[2]!r} that is {type(tensor).__name__} "
                f"({tensor.layout} on {tensor.device}); a checkpoint keeps composite tensors of dense ones"
            )
        tensors[name] = tensor.detach()
        return {"__tensor__": name}
    kind = type(tensor)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    try:
        plain = to_plain(context, "context")
    except ConfigError as error:
        raise ConfigError(
            f"tensor {path!r} is {_title(kind)}, which is made of tensors and a context that a checkpoint does not "
            f"keep ({error}); use an optimizer or layer whose tensors have a plain context"
        ) from error
    inner: Inner = {
        "class": _title(kind),
        "inner": {one: _describe(path, getattr(tensor, one), f"{name}/{one}", tensors) for one in names},
        "context": plain,
        "size": list(tensor.shape),
        "stride": list(tensor.stride()),
    }
    _check_made_again(path, tensor=tensor, context=context, inner=inner, tensors=tensors)
    return inner


def _check_made_again(
    path: str, tensor: torch.Tensor, context: Any, inner: Inner, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Refuse a tensor that what is kept of it does not make again."""
    reason = ""
    try:
        made = _make(inner, tensors.__getitem__, kinds_in(tensor))
        _, again = made.__tensor_flatten__()  # type: ignore[attr-defined]
        if made.shape != tensor.shape or made.dtype != tensor.dtype or not _is_equal(context, again):
            reason = f"it becomes {tuple(made.shape)} {made.dtype} with {again}"
    except Exception as error:  # noqa: BLE001 - whatever a class raises, the message names the tensor
        reason = f"{type(error).__name__}: {error}"
    if reason:
        raise ConfigError(
            f"tensor {path!r} is {_title(type(tensor))}, which its own __tensor_unflatten__ does not make again from "
            f"its parts ({reason}), so it could not be loaded; use a class that does"
        )


def _make(inner: Inner, read: Callable[[str], torch.Tensor], kinds: Collection[type]) -> torch.Tensor:
    """Make the tensor that plain values describe, of these classes or those that are safe."""
    if "class" not in inner:
        (name,) = tensors_named(inner)
        return read(name)
    kind = find_class(inner["class"], kinds)
    parts = {name: _make(one, read, kinds) for name, one in inner["inner"].items()}
    context = from_plain(inner["context"], {})
    made: torch.Tensor = kind.__tensor_unflatten__(parts, context, torch.Size(inner["size"]), tuple(inner["stride"]))
    return made


def _make_box(path: str, box: Box, read: Callable[[str], torch.Tensor], kinds: Collection[type]) -> torch.Tensor:
    """Make what a box has, which must be what the box says."""
    made = _make(box.inner, read, kinds)
    # A class may forget its data type inside a DTensor and say another one of floating point than the whole.
    is_alike = made.dtype == box.dtype or (made.is_floating_point() and box.dtype.is_floating_point)
    if tuple(made.shape) != box.sizes or not is_alike:
        raise CheckpointError(
            f"{path!r} is {box.sizes} {box.dtype} in the checkpoint, and its parts make {tuple(made.shape)} "
            f"{made.dtype}; the checkpoint is damaged, load another one"
        )
    return made


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor with its inner tensors on a device."""
    if tensor.device == device:
        return tensor
    if not is_composite(tensor):
        return tensor.to(device)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: _move(getattr(tensor, name), device) for name in names}
    kind: Any = type(tensor)
    moved: torch.Tensor = kind.__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
    return moved


def _is_equal(one: Any, other: Any) -> bool:
    """Compare two contexts; a list counts as a tuple of the same."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other)


# Another box than those saved -----------------------------------------------------------------------------------------


def _join(
    path: str,
    boxes: Sequence[Box],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    read: Callable[[str], torch.Tensor],
    kinds: Collection[type],
) -> torch.Tensor:
    """Make a box of rows of those that were saved, if that is exact.

    A class knows how its values lie in the inner tensors, and this function does not. So rows are taken by the class's
    own slicing; and what was joined counts only if slicing it gives all pieces back, bit for bit.
    """

    def refuse(reason: str) -> CheckpointError:
        kept = ", ".join(f"{box.offsets} + {box.sizes}" for box in boxes[:4])
        return CheckpointError(
            f"{path!r} ({boxes[0].class_name or boxes[-1].class_name}) was saved in the boxes {kept}, and this rank "
            f"needs {offsets} + {sizes}, which cannot be made of them exactly: {reason}; load it with the layout that "
            "saved it, or use an optimizer with a plain state; nothing was loaded"
        )

    if not sizes:
        raise refuse("it has no dimensions")
    start, stop = offsets[0], offsets[0] + sizes[0]
    is_row = all(
        (box.offsets[1:], box.sizes[1:]) == (offsets[1:], sizes[1:]) and (not any(offsets[1:])) for box in boxes
    )
    if not is_row:
        raise refuse("it is cut along other dimensions than the first")
    needed = sorted(
        (box for box in boxes if box.offsets[0] < stop and start < box.offsets[0] + box.sizes[0]),
        key=lambda box: box.offsets[0],
    )
    pieces: list[torch.Tensor] = []
    at = start
    for box in needed:
        first, end = box.offsets[0], min(stop, box.offsets[0] + box.sizes[0])
        if first > at:
            break
        try:
            pieces.append(_rows(_make_box(path, box, read, kinds), at - first, end - first))
        except CheckpointError:
            raise
        except Exception as error:
            raise refuse(f"{type(error).__name__}: {error}") from error
        at = end
    if at != stop:
        raise refuse("some rows are in none of them")
    if len({type(piece) for piece in pieces}) > 1:
        raise refuse("some ranks held plain tensors, others did not")
    if len(pieces) == 1:
        return pieces[0]
    if not is_composite(pieces[0]):
        return torch.cat(pieces)
    for joined in _candidates(pieces, sizes):
        if _gives_back(joined, pieces):
            return joined
    raise refuse("joining the inner tensors does not give what was saved")


def _rows(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return rows of a tensor, as its class cuts them, with the context that the whole has."""
    if (start, stop) == (0, len(tensor)):
        return tensor
    cut = tensor[start:stop]
    if not is_composite(tensor):
        return cut
    if type(cut) is not type(tensor):
        raise TypeError(f"a slice of {_title(type(tensor))} is {_title(type(cut))}")
    names, _ = cut.__tensor_flatten__()  # type: ignore[attr-defined]
    # Classes may leave out of a slice what stands in the context beside the shape, such as the data type.
    return _remade(tensor, {name: getattr(cut, name) for name in names}, cut.shape)


def _remade(like: torch.Tensor, parts: dict[str, torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """Make a tensor of a class from parts, with the context of another whose shape it does not have."""
    _, context = like.__tensor_flatten__()  # type: ignore[attr-defined]
    kind: Any = type(like)
    plain = torch.empty(shape, dtype=like.dtype, device="meta")
    made: torch.Tensor = kind.__tensor_unflatten__(
        parts, _with_shape(context, tuple(like.shape), tuple(shape)), shape, plain.stride()
    )
    return made


def _with_shape(context: Any, old: tuple[int, ...], new: tuple[int, ...]) -> Any:
    """Return a context with another shape where it has the old one."""
    if isinstance(context, (list, tuple)):
        if tuple(context) == old and all(type(one) is int for one in context):
            return type(context)(new)
        changed = [_with_shape(one, old, new) for one in context]
        return changed if isinstance(context, list) else tuple(changed)
    if isinstance(context, dict):
        return {key: _with_shape(one, old, new) for key, one in context.items()}
    return context


def _candidates(pieces: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> Iterable[torch.Tensor]:
    """Yield what the pieces may be together: each inner tensor either joined, or the same in all pieces."""
    names, _ = pieces[0].__tensor_flatten__()  # type: ignore[attr-defined]
    choices: list[list[torch.Tensor]] = []
    for name in names:
        inner = [getattr(piece, name) for piece in pieces]
        if any(is_composite(one) for one in inner):
            return
        found = [torch.cat(inner)] if inner[0].ndim else []
        if all(one.shape == inner[0].shape and torch.equal(bytes_of(one), bytes_of(inner[0])) for one in inner):
            found.append(inner[0])
        choices.append(found)
    for parts in product(*choices):
        try:
            made = _remade(pieces[0], dict(zip(names, parts, strict=True)), torch.Size(sizes))
        except Exception:  # noqa: BLE001, S112 - a class refuses parts that do not go together
            continue
        if tuple(made.shape) == sizes:
            yield made


def _gives_back(joined: torch.Tensor, pieces: Sequence[torch.Tensor]) -> bool:
    """Tell whether slicing a tensor gives its pieces back, bit for bit."""
    names, _ = joined.__tensor_flatten__()  # type: ignore[attr-defined]
    at = 0
    for piece in pieces:
        try:
            cut = _rows(joined, at, at + len(piece))
        except Exception:  # noqa: BLE001 - a class refuses to cut what does not go together
            return False
        at += len(piece)
        for name in names:
            mine, its = getattr(cut, name), getattr(piece, name)
            if mine.shape != its.shape or mine.dtype != its.dtype or not torch.equal(bytes_of(mine), bytes_of(its)):
                return False
    return True
