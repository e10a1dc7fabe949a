"""The pickle in an archive of ``torch.save``, followed step by step before anything of it is made.

``torch.load(weights_only=True)`` calls only what it knows. A few bytes can still ask it for work without end (a key of
a mapping that is a tuple of tuples, each twice the one before) or for memory that the file does not have (a tensor of
any size, with nothing in it). So each step is followed here with values that only say of what kind they are, and what
``torch.save`` never writes of tensors and plain values is refused.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["MOST_DEPTH", "check_pickle"]

MOST_DEPTH = 200
"""How deep what is read may be nested"""
SMALL_WORK = 1 << 16
"""Values that may be hashed or handed to functions in any pickle, however short"""
WORK_A_BYTE = 8
"""And for each byte of it; a value that is written is handed over a few times at most"""
LARGEST_KEY = 2**61 - 2
"""The largest integer that is the key of a mapping: beyond it, Python gives any number of integers the same hash"""

UTILS, BUILTINS = "torch._utils.", "builtins."
REBUILDS = frozenset(
    UTILS + name
    for name in (
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
        "_rebuild_qtensor",
        "_rebuild_wrapper_subclass",
    )
)
"""What makes a tensor out of memory that the archive has"""
REBUILD_AS = "torch._tensor._rebuild_from_type_v2"
"""What calls one of these, and makes the tensor one of another class"""
ORDERED, COUNTER, SET, ENCODE = "collections.OrderedDict", "collections.Counter", BUILTINS + "set", "_codecs.encode"
CALLED = REBUILDS | {
    REBUILD_AS,
    ORDERED,
    COUNTER,
    SET,
    ENCODE,
    BUILTINS + "complex",
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
}
MEMORY = {
    **dict.fromkeys(("ComplexDoubleStorage",), 16),
    **dict.fromkeys(("ComplexFloatStorage", "DoubleStorage", "LongStorage"), 8),
    **dict.fromkeys(("FloatStorage", "IntStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("BFloat16Storage", "HalfStorage", "ShortStorage"), 2),
    **dict.fromkeys(("BoolStorage", "ByteStorage", "CharStorage"), 1),
    **dict.fromkeys(("QInt8Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage"), 1),
}
"""The kinds of memory that ``torch.save`` names, and the bytes of their elements"""
NAMED = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter"})
"""Classes that a pickle may name, and not call"""
NOT_KEPT = ("torch.distributed.", "torch.nested.", "torch._dynamo.")
"""Where classes are that torch itself has added to those that users vouch for, and that no checkpoint keeps"""


@dataclass(eq=False, slots=True)
class _Value:
    """What is known of a value.

    :param kind: ``name``, ``tuple``, ``list``, ``dict``, ``text``, ``integer``, or what else it is.
    :param content: The name, the text, the integer, or the values in a tuple.
    :param work: How many values are looked at where it is hashed or copied.
    :param depth: How deep its tuples are nested.
    """

    kind: str
    content: Any = None
    work: int = 1
    depth: int = 0


PLAIN: dict[str, Callable[[Any], _Value]] = {
    "NONE": lambda _: _Value("none"),
    "NEWTRUE": lambda _: _Value("truth"),
    "NEWFALSE": lambda _: _Value("truth"),
    "BININT": lambda number: _Value("integer", number),
    "BININT1": lambda number: _Value("integer", number),
    "BININT2": lambda number: _Value("integer", number),
    "LONG1": lambda number: _Value("integer", number),
    "BINFLOAT": lambda _: _Value("float"),
    "BINUNICODE": lambda text: _Value("text", text),
    "EMPTY_LIST": lambda _: _Value("list"),
    "EMPTY_DICT": lambda _: _Value("dict"),
    "EMPTY_TUPLE": lambda _: _Value("tuple", ()),
}
"""What puts one value on the stack that needs no other"""


def check_pickle(data: bytes, records: Mapping[str, int]) -> None:
    """Refuse a pickle that ``torch.save`` does not write of tensors and plain values; local.

    :param data: The pickle.
    :param records: The keys of the archive's memories of tensors, with the bytes of each.
    :raises ValueError: if it is refused; the text says why.
    """
    try:
        _Steps(len(data), records).follow(data)
    except (pickle.UnpicklingError, IndexError, KeyError, ValueError) as error:
        told = error if isinstance(error, pickle.UnpicklingError) else f"{type(error).__name__}"
        raise ValueError(f"its pickle is none that torch.save writes of tensors: {told}") from error


class _Steps:
    """The state of a pickle that is followed: its stack, what it remembers, and the work that it may still ask for."""

    def __init__(self, size: int, records: Mapping[str, int]) -> None:
        self._left = SMALL_WORK + WORK_A_BYTE * size
        self._records = records
        self._stack: list[_Value] = []
        self._marked: list[list[_Value]] = []
        self._memory: dict[int, _Value] = {}
        self._vouched = _vouched_names()

    def follow(self, data: bytes) -> None:
        """Follow all steps to the end."""
        for opcode, argument, _ in pickletools.genops(data):
            if make := PLAIN.get(opcode.name):
                self._stack.append(make(argument))
            elif step := STEPS.get(opcode.name):
                step(self, argument)
            else:
                raise pickle.UnpicklingError(f"it has a step {opcode.name}")
        if len(self._stack) != 1 or self._marked:
            raise pickle.UnpicklingError("it leaves values over")

    # The steps -------------------------------------------------------------------------------------------------------

    def mark(self, _: Any) -> None:
        """Begin a row of values."""
        self._marked.append(self._stack)
        self._stack = []

    def tuple_of_marked(self, _: Any) -> None:
        """Make a tuple of the row."""
        row = self._pop_marked()  # before the stack is looked up, which it changes
        self._stack.append(_tuple_of(row))

    def tuple_of(self, count: int) -> None:
        """Make a tuple of the last values."""
        values = self._pop(count)
        self._stack.append(_tuple_of(values))

    def append(self, _: Any) -> None:
        """Put a value into a list."""
        self._extend(self._pop(1))

    def append_marked(self, _: Any) -> None:
        """Put the row into a list."""
        self._extend(self._pop_marked())

    def set_item(self, _: Any) -> None:
        """Put a key and a value into a mapping."""
        self._set_items(self._pop(2))

    def set_marked(self, _: Any) -> None:
        """Put the row's keys and values into a mapping."""
        self._set_items(self._pop_marked())

    def remember(self, place: int) -> None:
        """Remember a value."""
        self._memory[place] = self._stack[-1]

    def recall(self, place: int) -> None:
        """Put what was remembered on the stack once more."""
        self._stack.append(self._memory[place])

    def name(self, told: str) -> None:
        """Look a name up."""
        module, _, name = told.partition(" ")
        module = {"__builtin__": "builtins"}.get(module, module)
        path = f"{module}.{name}"
        if path not in CALLED | NAMED | self._vouched and not _is_plain_name(module, name):
            raise pickle.UnpicklingError(
                f"it would call {shown_name(told)}, something else than tensors and plain values"
            )
        self._stack.append(_Value("name", path))

    def call(self, _: Any) -> None:
        """Call a function."""
        function, arguments = self._pop(2)
        if function.kind != "name" or arguments.kind != "tuple":
            raise pickle.UnpicklingError("it calls what has no name")
        self._take(arguments.work)
        path, given = function.content, arguments.content
        if path not in CALLED | self._vouched:
            raise pickle.UnpicklingError(f"it would call {path}")
        kinds = [one.kind for one in given]
        if path == REBUILD_AS and given[0].content not in REBUILDS | self._vouched:
            raise pickle.UnpicklingError(f"it would call {shown_name(given[0].content)} for a tensor")
        rules: dict[str, list[list[str]]] = {
            ORDERED: [[]],
            COUNTER: [[], ["dict"]],
            SET: [["list"]],
            ENCODE: [["text", "text"]],
        }
        is_text = path == ENCODE and kinds == ["text", "text"] and given[1].content != "latin1"
        if (path in rules and kinds not in rules[path]) or is_text:
            raise pickle.UnpicklingError(f"it gives {path} what it is not made of")
        if path == SET:
            self._take(given[0].work)
        kind = {ORDERED: "dict", COUNTER: "dict"}.get(path, path)
        self._stack.append(_Value(kind, work=arguments.work, depth=arguments.depth))

    def make(self, _: Any) -> None:
        """Make an object of a class that the user vouches for."""
        kind, arguments = self._pop(2)
        if kind.kind != "name" or kind.content not in self._vouched:
            raise pickle.UnpicklingError("it makes an object of a class that nobody vouches for")
        self._take(arguments.work)
        self._stack.append(_Value(kind.content, work=arguments.work, depth=arguments.depth))

    def build(self, _: Any) -> None:
        """Give an object its state."""
        (state,) = self._pop(1)
        kind = self._stack[-1].kind
        if kind not in self._vouched and (kind, state.kind) != ("dict", "dict"):
            raise pickle.UnpicklingError(f"it gives {kind} a state")
        self._take(state.work)

    def memory_of(self, _: Any) -> None:
        """Take the memory of a tensor, which must have as many bytes as the pickle says."""
        (told,) = self._pop(1)
        kinds = [one.kind for one in told.content] if told.kind == "tuple" else []
        if kinds != ["text", "name", "text", "text", "integer"]:
            raise pickle.UnpicklingError("it names memory in another way")
        _, kind, key, _, count = (one.content for one in told.content)
        size = _bytes_of(kind)
        if size is None or not 0 <= count * size <= self._records.get(key, 0):
            raise pickle.UnpicklingError(f"it says that memory has {count} elements, which the archive does not hold")
        self._stack.append(_Value("memory"))

    def nothing(self, _: Any) -> None:
        """Begin, or end."""

    # Their parts -----------------------------------------------------------------------------------------------------

    def _pop(self, count: int) -> list[_Value]:
        if len(self._stack) < count:
            raise pickle.UnpicklingError("it takes more values than there are")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _pop_marked(self) -> list[_Value]:
        row = self._stack
        self._stack = self._marked.pop()
        return row

    def _extend(self, values: list[_Value]) -> None:
        if self._stack[-1].kind != "list":
            raise pickle.UnpicklingError("it appends to what is no list")
        self._stack[-1].work += sum(one.work for one in values)

    def _set_items(self, row: list[_Value]) -> None:
        if self._stack[-1].kind != "dict" or len(row) % 2:
            raise pickle.UnpicklingError("it puts values into what is no mapping")
        for key in row[::2]:
            if key.kind == "integer" and abs(key.content) > LARGEST_KEY:
                raise pickle.UnpicklingError("a key is an integer that is too large")
            self._take(key.work)
        self._stack[-1].work += len(row)

    def _take(self, work: int) -> None:
        self._left -= work
        if self._left < 0:
            raise pickle.UnpicklingError("it makes far more of its values than it has bytes")


STEPS: dict[str, Callable[[_Steps, Any], None]] = {
    "PROTO": _Steps.nothing,
    "STOP": _Steps.nothing,
    "MARK": _Steps.mark,
    "TUPLE": _Steps.tuple_of_marked,
    "TUPLE1": lambda steps, _: steps.tuple_of(1),
    "TUPLE2": lambda steps, _: steps.tuple_of(2),
    "TUPLE3": lambda steps, _: steps.tuple_of(3),
    "APPEND": _Steps.append,
    "APPENDS": _Steps.append_marked,
    "SETITEM": _Steps.set_item,
    "SETITEMS": _Steps.set_marked,
    "BINPUT": _Steps.remember,
    "LONG_BINPUT": _Steps.remember,
    "BINGET": _Steps.recall,
    "LONG_BINGET": _Steps.recall,
    "GLOBAL": _Steps.name,
    "REDUCE": _Steps.call,
    "NEWOBJ": _Steps.make,
    "BUILD": _Steps.build,
    "BINPERSID": _Steps.memory_of,
}
"""What follows each step that ``torch.save`` writes"""


def shown_name(name: object) -> str:
    """Return a name of a pickle as it may stand in a message."""
    return ascii(name)[1:-1][:100] if isinstance(name, str) else "what has no name"


def _tuple_of(values: list[_Value]) -> _Value:
    depth = 1 + max((one.depth for one in values), default=0)
    if depth > MOST_DEPTH:
        raise pickle.UnpicklingError(f"its values are nested more than {MOST_DEPTH} deep")
    # Capped, so that numbers of tuples that are twice the one before stay short.
    work = min(1 + sum(one.work for one in values), 1 << 62)
    return _Value("tuple", tuple(values), work=work, depth=depth)


def _vouched_names() -> frozenset[str]:
    """Return the names of what the user has given to ``torch.serialization.add_safe_globals``."""
    names = set()
    for one in torch.serialization.get_safe_globals():
        if isinstance(one, tuple):
            names.add(str(one[1]))
        else:
            names.add(f"{one.__module__}.{one.__qualname__}")
    return frozenset(name for name in names if not name.startswith(NOT_KEPT))


def _is_plain_name(module: str, name: str) -> bool:
    """Tell whether a name is a data type, a kind of memory or a way of quantizing."""
    if module not in ("torch", "torch.storage") or not name.isidentifier():
        return False
    return _bytes_of(f"{module}.{name}") is not None or (
        module == "torch" and isinstance(vars(torch).get(name), (torch.dtype, torch.qscheme))
    )


def _bytes_of(path: str) -> int | None:
    """Return the bytes of an element of a kind of memory; ``None`` where it is none."""
    if path == "torch.storage.UntypedStorage":
        return 1
    module, _, name = path.rpartition(".")
    return MEMORY.get(name) if module == "torch" else None
