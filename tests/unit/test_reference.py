"""The code against the five reference documents: every name, parameter and default."""

from __future__ import annotations

import importlib
import inspect
import json
import types
import typing
from collections import Counter
from dataclasses import MISSING, fields
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d  # evaluated by name
from torch.distributed.device_mesh import DeviceMesh

from tests.reference.documents import DOCUMENTS, HERE, find_shared, parse_markdown, parse_rst
from tests.reference.names import EXISTS, ISSUES, REASONS
from xffl.distributed import distributed_state
from xffl.distributed.distributed_state import DistributedState

TABLE = HERE / "distributed_state.json"
PROMISED: dict[str, Any] = json.loads(TABLE.read_text())
MARKDOWN = [name for name in DOCUMENTS if name.endswith(".md")]


def evaluate(text: str) -> Any:
    """The type that a document writes; it writes ``Ellipsis`` for three dots."""
    scope = {"torch": torch, "Optional": typing.Optional, "Tuple": tuple, "bool": bool, "int": int, "str": str}
    return eval(text, {**scope, "None": None, "Ellipsis": ..., "DeviceMesh": DeviceMesh})


def parts(kind: Any) -> frozenset[Any]:
    """The members of a union, or the type alone."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return frozenset(typing.get_args(kind))
    return frozenset([type(None) if kind is None else kind])


def check_signature(function: Any, promise: dict[str, Any]) -> None:
    signature = inspect.signature(function)
    have = [name for name in signature.parameters if name != "self"]
    promised = [parameter["name"] for parameter in promise["parameters"]]
    assert have[: len(promised)] == promised
    # More may follow what was promised, if nobody has to give them.
    assert all(signature.parameters[name].default is not inspect.Parameter.empty for name in have[len(promised) :])
    hints = typing.get_type_hints(function)
    for parameter in promise["parameters"]:
        default = signature.parameters[parameter["name"]].default
        shown = None if default is inspect.Parameter.empty else repr(default)
        assert shown == parameter["default"], parameter
        want = {tuple[int, ...] if kind == tuple[int] else kind for kind in parts(evaluate(parameter["type"]))}
        assert want <= parts(hints[parameter["name"]]), (parameter, hints[parameter["name"]])
    if promise["returns"] is not None:
        assert parts(hints["return"]) == parts(evaluate(promise["returns"]))


def test_the_table_is_the_document() -> None:
    shared = find_shared()
    if shared is None:
        pytest.skip("the reference documents are not on this machine; the table stands for them")
    assert parse_rst((shared / "distributed_state.rst").read_text()) == PROMISED


def test_the_table_is_whole() -> None:
    assert (len(PROMISED["fields"]), len(PROMISED["methods"])) == (29, 23)
    assert PROMISED["data"] == ["logger"] and list(PROMISED["functions"]) == ["create_device_mesh"]


@pytest.mark.parametrize("name", PROMISED["fields"])
def test_fields(name: str) -> None:
    promise = PROMISED["fields"][name]
    (field,) = [field for field in fields(DistributedState) if field.name == name]
    assert field.default is not MISSING and repr(field.default) == promise["value"]
    assert repr(getattr(DistributedState(), name)) == promise["value"]
    assert parts(typing.get_type_hints(DistributedState)[name]) == parts(evaluate(promise["type"]))


def test_fields_stand_in_order_and_are_all() -> None:
    assert [field.name for field in fields(DistributedState) if not field.name.startswith("_")] == list(
        PROMISED["fields"]
    )


@pytest.mark.parametrize("name", PROMISED["methods"])
def test_methods(name: str) -> None:
    method = getattr(DistributedState, name)
    check_signature(method, PROMISED["methods"][name])
    assert inspect.getdoc(method), name


def test_public_methods_are_those_of_the_document() -> None:
    have = {name for name, _ in inspect.getmembers(DistributedState, inspect.isfunction) if not name.startswith("_")}
    assert have == {name for name in PROMISED["methods"] if not name.startswith("_")}


@pytest.mark.parametrize("name", PROMISED["functions"])
def test_functions(name: str) -> None:
    check_signature(getattr(distributed_state, name), PROMISED["functions"][name])


def test_logger() -> None:
    assert distributed_state.logger.name == "xffl"


def places(document: str) -> Counter[str]:
    """How many places the table gives each name of a document."""
    issues = [name for names in ISSUES[document].values() for name in names.split()]
    reasons = [name for names in REASONS[document].values() for name in names.split()]
    return Counter([*EXISTS[document], *issues, *reasons])


@pytest.mark.parametrize("document", MARKDOWN)
def test_every_promised_name_has_one_place(document: str) -> None:
    twice = [name for name, count in places(document).items() if count > 1]
    assert not twice, twice
    shared = find_shared()
    if shared is None:
        pytest.skip("the reference documents are not on this machine; the table stands for them")
    promised = parse_markdown((shared / document).read_text())
    assert promised - set(places(document)) == set(), "names without a place"
    assert set(places(document)) - promised == set(), "names that the document does not have"


@pytest.mark.parametrize("document, name", [(document, name) for document in MARKDOWN for name in EXISTS[document]])
def test_names_that_exist_can_be_imported(document: str, name: str) -> None:
    module, _, attribute = EXISTS[document][name].partition(":")
    assert attrgetter(attribute)(importlib.import_module(module)) is not MISSING


@pytest.mark.parametrize("document", MARKDOWN)
def test_issues_and_reasons_are_said(document: str) -> None:
    assert set(ISSUES[document]) <= {3, 4, 5, 6, 7}
    assert all(len(reason) > 20 for reason in REASONS[document])
