"""Changes to valid inputs that turn them into what a broken disk, an older version or an attacker may leave."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from tests.chaos.inputs.parser import Form

DIGITS = "7" * 5000
MANY_DIGITS = 10**4299
"""The longest integer that Python reads and writes; sums of it are longer"""
_DIGITS_MARK = "five-thousand-digits"
"""Stands for the digits in trees, since Python does not write such integers"""

ODD_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        -(2**63),
        2**64,
        10**300,
        MANY_DIGITS,
        0.5,
        -0.0,
        1e308,
        1e-320,
        10**18,
    ),
    *(float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "x",
        "3",
        "-1",
        "NaN",
        "null",
        "true",
        "../../etc/passwd",
        "/",
        "a\nb",
        "é😀",
        "\x00",
        "\x1b[31m",
        "%s{}",
    ),
    *("x" * 100_000, "os.system", "torch.optim.SGD", "n[1-99999999999]", "1e999", "0x10", "12:30", _DIGITS_MARK),
    *(
        [],
        {},
        [None],
        [[]],
        [1, 2, 3],
        {"": None},
        {"x": {"y": []}},
        ["a"] * 1000,
        [0] * 100_000,
        [[[[[[[[[[1]]]]]]]]]],
    ),
    {str(number): number for number in range(1000)},
)
"""What stands in the place of a value"""
ODD_WORDS = (
    *("", "0", "-1", "1", "2", "99999999", "99999999999", "1e9", "1e400", "-inf", "nan", "0.5", "0x10", DIGITS, "null"),
    *("[", "]", "n[1-99999999999]", "n[1-", "n[3-1]", "n[0-9][0-9][0-9]", ",", ",,", "=", ":", "a=b", "a=1", "*", "~"),
    *("/", "..", "\\", "\x00", "é", "%d", "{}", "$HOME", "--help", "x" * 100_000, "[[" * 500, "1-2-3", "10**9", "1,2"),
)
"""What stands in the place of a word or a number of a text"""
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
WHOLE = (
    *(b"", b" ", b"\n", b"null", b"0", b"3", b'"x"', b"[]", b"{}", b"[1, 2]", b"true", b"NaN", b"\xff\xfe", b"\x00"),
    *(b"[" * 100_000, b'{"a":' * 20_000, b"[" * 500 + b"]" * 500, b'{"a":' * 300 + b"1" + b"}" * 300, b"- " * 500),
    *(BOMB.encode(), b"a: &a [*a]\n", b"a: &a {b: *a}\n", b"<<: [1]\n", b"? [a]\n: 1\n", b"--- 1\n--- 2\n"),
    *(b"!!python/object/apply:os.system ['true']", b"!!bool maybe", b"!!timestamp x", b"!!binary '*'", b'"\\ud800"'),
    *(DIGITS.encode(), f'{{"a": {DIGITS}}}'.encode(), b'{"a": 1, "a": 2}', b"\xef\xbb\xbf{}", b"x" * 1_000_000),
)
"""What stands in the place of a whole input"""


def mutate(example: bytes, form: Form, chance: random.Random) -> bytes:
    """Return a changed input; equal numbers of ``chance`` change it alike."""
    if chance.random() < 0.04:
        return chance.choice(WHOLE)
    change: Callable[[bytes, random.Random], bytes] = _bytes
    if form != "bytes" and chance.random() < 0.75:
        change = {"json": _json_tree, "yaml": _yaml_tree, "lines": _one_line, "text": _words}[form]
    content = change(example, chance)
    return _bytes(content, chance) if chance.random() < 0.05 else content


# Bytes ----------------------------------------------------------------------------------------------------------------


def _bytes(content: bytes, chance: random.Random) -> bytes:
    return chance.choice(_BYTE_CHANGES)(content, chance)


def _flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 4, 16))):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _truncate(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def _cut_out(content: bytes, chance: random.Random) -> bytes:
    first = chance.randrange(len(content) + 1)
    return content[:first] + content[first + chance.choice((1, 4, 64)) :]


def _repeat(content: bytes, chance: random.Random) -> bytes:
    first = chance.randrange(len(content) + 1)
    part = content[first : first + chance.choice((1, 8, 200))]
    return content[:first] + part * chance.choice((2, 3, 100)) + content[first:]


def _insert(content: bytes, chance: random.Random) -> bytes:
    first = chance.randrange(len(content) + 1)
    inserted = (
        b"\x00",
        b"\xff",
        b"\n",
        b'"',
        b"[",
        b"{",
        b"}",
        b"&a ",
        b"*a",
        b"<<: ",
        b"\\ud800",
        chance.randbytes(8),
    )
    return content[:first] + chance.choice(inserted) + content[first:]


def _encode(content: bytes, chance: random.Random) -> bytes:
    text = content.decode("utf-8", errors="replace")
    return text.encode(chance.choice(("utf-16", "utf-32", "utf-8-sig", "cp037", "utf-7")), errors="replace")


def _number(content: bytes, chance: random.Random) -> bytes:
    """Put something else in the place of one number."""
    found = list(re.finditer(rb"-?\d+(?:\.\d+)?", content))
    if not found:
        return _flip(content, chance)
    one = chance.choice(found)
    odd = (
        "-1",
        "0",
        "1e999",
        "NaN",
        "Infinity",
        "-Infinity",
        DIGITS,
        f"0.{DIGITS}",
        f"1e{DIGITS}",
        "99999999999",
        "true",
    )
    return content[: one.start()] + chance.choice(odd).encode() + content[one.end() :]


def _name_twice(content: bytes, chance: random.Random) -> bytes:
    """Give a name of an object, or a line, a second time."""
    lines = content.split(b"\n")
    if len(lines) > 1 and chance.random() < 0.5:
        at = chance.randrange(len(lines))
        return b"\n".join([*lines[: at + 1], *lines[at:]])
    found = list(re.finditer(rb'\{\s*("[^"]*"\s*:)', content))
    if not found:
        return _repeat(content, chance)
    one = chance.choice(found)
    return content[: one.start(1)] + one[1] + b" null, " + content[one.start(1) :]


_BYTE_CHANGES = (_flip, _truncate, _cut_out, _repeat, _insert, _encode, _number, _number, _name_twice)


# Trees ----------------------------------------------------------------------------------------------------------------


def _json_tree(content: bytes, chance: random.Random) -> bytes:
    tree = _changed_tree(json.loads(content), chance)
    return json.dumps(tree).replace(f'"{_DIGITS_MARK}"', DIGITS).encode()


def _yaml_tree(content: bytes, chance: random.Random) -> bytes:
    tree = _changed_tree(yaml.safe_load(content), chance)
    if chance.random() < 0.3:
        return json.dumps(tree, default=str).replace(f'"{_DIGITS_MARK}"', DIGITS).encode()
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).replace(_DIGITS_MARK, DIGITS).encode()


def _one_line(content: bytes, chance: random.Random) -> bytes:
    lines = content.splitlines()
    at = chance.choice((0, len(lines) - 1, chance.randrange(len(lines))))
    try:
        lines[at] = _json_tree(lines[at], chance)
    except ValueError:
        lines[at] = _bytes(lines[at], chance)
    return b"\n".join(lines) + b"\n"


def _changed_tree(tree: Any, chance: random.Random) -> Any:
    """Change one value of a tree, or several."""
    holder = [copy.deepcopy(tree)]
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        parents = _parents(holder)
        parent, key = chance.choice(parents)
        chance.choice(_TREE_CHANGES)(parent, key, chance)
    return holder[0] if holder else None


def _parents(tree: Any) -> list[tuple[Any, Any]]:
    """Return each place of a tree: the list or mapping, and the index or name there."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        keys: Sequence[Any] = list(one) if isinstance(one, dict) else range(len(one))
        for key in keys[:2000]:
            found.append((one, key))
            if isinstance(one[key], dict | list):
                waiting.append(one[key])
    return found


def _replace(parent: Any, key: Any, chance: random.Random) -> None:
    parent[key] = copy.deepcopy(chance.choice(ODD_VALUES))


def _retype(parent: Any, key: Any, chance: random.Random) -> None:
    """Give a value another type with the same content."""
    value = parent[key]
    parent[key] = chance.choice((str(value)[:1000], [value], {"value": value}, bool(value)))


def _shift(parent: Any, key: Any, chance: random.Random) -> None:
    """Change a number a little or much, a text by one character."""
    value = parent[key]
    if isinstance(value, int | float) and abs(value) < 1e300:
        parent[key] = chance.choice((value + 1, value - 1, -value, value + 0.5, 99_999_999, 10**12))
    elif isinstance(value, str):
        parent[key] = chance.choice((value + "x", value[1:], value.upper(), value[::-1], value + "\n"))
    else:
        _replace(parent, key, chance)


def _delete(parent: Any, key: Any, chance: random.Random) -> None:
    if isinstance(parent, dict) or len(parent) > 1:
        del parent[key]


def _rename(parent: Any, key: Any, chance: random.Random) -> None:
    if isinstance(parent, dict):
        parent[chance.choice((f"{key}s", str(key).upper(), "", "x", "__class__"))] = parent.pop(key)
    else:
        parent.append(copy.deepcopy(parent[key]))


def _swap(parent: Any, key: Any, chance: random.Random) -> None:
    other = chance.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    parent[key], parent[other] = parent[other], parent[key]


def _empty(parent: Any, key: Any, chance: random.Random) -> None:
    value = parent[key]
    parent[key] = type(value)() if isinstance(value, dict | list | str) else None


_TREE_CHANGES = (_replace, _replace, _replace, _retype, _shift, _shift, _delete, _delete, _rename, _swap, _empty)


# Words ----------------------------------------------------------------------------------------------------------------


def _words(content: bytes, chance: random.Random) -> bytes:
    """Put odd words in the place of words and numbers of a text."""
    text = content.decode("utf-8", errors="replace")
    for _ in range(chance.choice((1, 1, 2, 3))):
        found = list(re.finditer(r"[A-Za-z_]+|\d+(?:\.\d+)?|[^\w\s]", text))
        if not found:
            break
        one = chance.choice(found)
        text = text[: one.start()] + chance.choice(ODD_WORDS) + text[one.end() :]
    return text.encode("utf-8", errors="replace")
