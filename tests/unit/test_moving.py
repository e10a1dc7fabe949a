"""Batches of any make on another device: the meta device stands for one."""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from xffl.parallel.moving import to_device

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
