"""What moves: batches of any make to another device (meta stands for one), and tensors of any layout as bytes."""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from xffl.distributed.values.sharding import bytes_of, from_bytes
from xffl.parallel.strategy import to_device
from xffl.training.models.weights import _checksum

META = torch.device("meta")
CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: torch.Tensor
    y: Any


@dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor
    length: int = field(default=3, init=False)
    extra: Any = None


def test_everything_that_holds_tensors_moves() -> None:
    x = torch.ones(2)
    assert to_device(x, META).is_meta
    moved = to_device({"a": [x, (x, "text")], 3: None}, META)
    assert moved["a"][0].is_meta and moved["a"][1][0].is_meta and moved["a"][1][1] == "text" and moved[3] is None
    pair = to_device(Pair(x, {"z": x}), META)
    assert type(pair) is Pair and pair.x.is_meta and pair.y["z"].is_meta
    batch = to_device(Batch(x, extra=Pair(x, 1)), META)
    assert type(batch) is Batch and batch.tokens.is_meta and batch.extra.x.is_meta and batch.length == 3
    ordered = to_device(OrderedDict(b=x, a=x), META)
    assert type(ordered) is OrderedDict and list(ordered) == ["b", "a"] and ordered["a"].is_meta
    counted: defaultdict[str, list[Any]] = defaultdict(list, {"k": [x]})
    found = to_device(counted, META)
    assert type(found) is defaultdict and found["k"][0].is_meta and found["new"] == []
    assert not counted["k"][0].is_meta


def test_what_an_object_has_beside_its_fields_goes_along() -> None:
    @dataclass
    class Counted:
        x: torch.Tensor

        def __post_init__(self) -> None:
            self.length = len(self.x)

    class Named(dict[str, Any]):
        note = ""

    x = torch.ones(2)
    assert to_device(Counted(x), META).length == 2
    named = Named(x=x)
    named.note = "kept"
    moved = to_device(named, META)
    assert type(moved) is Named and moved["x"].is_meta and moved.note == "kept" and not named["x"].is_meta
    packed = torch.nn.utils.rnn.pack_sequence([x, x[:1]])
    found = to_device([packed], META)[0]
    assert found.data.is_meta and found.batch_sizes.device.type == "cpu"


def test_everything_else_stays_as_it_is() -> None:
    thing = object()
    for value in (
        array("f", [1.5]),
        memoryview(b"ab"),
        thing,
        "text",
        b"bytes",
        3,
        None,
        range(3),
        [1, "a"],
        {"a": thing},
        Pair,
        Batch,
        {1, 2},
    ):
        assert to_device(value, META) is value
    x = torch.ones(2)
    for value in (x, [x], {"x": x}, Pair(x, x), Batch(x)):
        assert to_device(value, CPU) is value


class Named(torch.Tensor):
    """A tensor of a class of its own."""


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda table: table,
    "column": lambda table: table[:, 0],
    "column of one": lambda table: table[:1, 0],
    "box of one": lambda table: table[1:2, 3:4],
    "scalar": lambda table: table[1, 2],
    "empty column": lambda table: table[:0, 0],
    "empty box": lambda table: table[:, :0].T,
    "step": lambda table: table[::2],
    "transposed": lambda table: table.T,
    "transposed column": lambda table: table.T[:, :1],
    "diagonal": lambda table: table.diagonal(),
    "expanded": lambda table: table[0].expand(3, -1),
    "expanded scalar": lambda table: table[1, 2].expand(4),
    "windows": lambda table: table.flatten().unfold(0, 4, 1),
    "channels last": lambda table: table.reshape(1, 4, 3, 2).to(memory_format=torch.channels_last),
    "class of its own": lambda table: table.as_subclass(Named)[:1, 0],
    "trained": lambda table: table.clone().requires_grad_(table.is_floating_point())[:1, 0],
}
COMPLEX: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "real part": lambda table: table.real,
    "conjugate": lambda table: table.conj(),
    "column of one conjugate": lambda table: table.conj()[:1, 0],
    "negated": lambda table: table.conj().imag,
    "one negated": lambda table: table.conj().imag[:1, 0],
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("layout", [*LAYOUTS, *COMPLEX])
def test_bytes_of_any_layout_are_those_of_the_elements_in_order(layout: str) -> None:
    for dtype in (torch.complex64, torch.complex128) if layout in COMPLEX else DTYPES:
        table = torch.arange(24.0).reshape(4, 6).to(torch.complex128).mul_(1 + 2j)
        tensor = {**LAYOUTS, **COMPLEX}[layout]((table if dtype.is_complex else table.real).to(dtype))
        data = bytes_of(tensor)
        assert (data.dtype, data.shape, data.stride()) == (torch.uint8, (tensor.nbytes,), (1,))
        wanted = torch.tensor(tensor.tolist(), dtype=tensor.dtype).reshape(tensor.shape)
        assert data.tolist() == list(bytes(wanted.untyped_storage()))
        assert _checksum(tensor) == _checksum(wanted)
        unaligned = torch.cat([data.new_zeros(1), data])[1:]
        back = from_bytes(unaligned, tensor.dtype, tensor.shape)
        assert back.dtype == tensor.dtype and back.tolist() == tensor.tolist()
