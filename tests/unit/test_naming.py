"""Names that become code: who may write them, and that nothing else in the package makes code of a text."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from xffl.aggregation.algorithms.combiners import Coordinatewise
from xffl.aggregation.algorithms.registry import make, resolve_algorithm
from xffl.aggregation.algorithms.robust import TrimmedMean
from xffl.aggregation.exports import RoundPlan
from xffl.errors import CheckpointError, ConfigError
from xffl.naming import Writer, check_maker, import_named

PACKAGE = Path(__file__).resolve().parents[2] / "xffl"

GETATTR = "getattr(torch, ...), which imports what it is asked for"
ALLOWED = {
    ("naming.py", "import_module"): "the one resolver of names",
    ("lazy.py", "import_module"): "homes of names that a package of xffl lists in its own source",
    ("cli/main.py", "import_module"): "modules of the table of commands",
    ("training/models/weights.py", "import_module"): "packages of extras, by names in the source",
    ("training/config/configuration.py", "import_module"): "the trainer that the user's configuration names",
    ("distributed/world.py", GETATTR): "names of the table of data types",
    ("cluster/launch/child.py", "import_module"): "modules of the package that its own launchers start",
    ("cluster/launch/script.py", "exec"): "the user's script that came through a pipe",
    ("cluster/launch/script.py", "runpy.run_path"): "the user's script",
    ("training/config/settings.py", "import_module"): "what jsonargparse has imported for the user's configuration",
}
"""Calls that import what a variable names, by file, and why they may"""


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    """Yield all calls of the package with the file and the name that is called, modules before it left out."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield path.relative_to(PACKAGE).as_posix(), node, ast.unparse(node.func)


def wrong(name: str, node: ast.Call) -> str | None:
    """Return why a call may make code of a text; ``None`` where it does not."""
    told = {one.arg: one.value.value for one in node.keywords if isinstance(one.value, ast.Constant)}
    first = node.args[0] if node.args else None
    last = name.rpartition(".")[2]
    if name in ("eval", "exec", "__import__", "pydoc.locate", "runpy.run_path", "os.system"):
        return name
    if last == "import_module" and not isinstance(first, ast.Constant):
        return "import_module"
    if name.partition(".")[0] in ("pickle", "marshal", "shelve", "dill", "cloudpickle") and last in (
        *("load", "loads", "Unpickler", "open"),
    ):
        return name
    if name == "torch.load" and told.get("weights_only") is not True:
        return "torch.load without weights_only=True"
    if name in ("np.load", "numpy.load") and told.get("allow_pickle") is not False:
        return "np.load without allow_pickle=False"
    if name.startswith("yaml.") and last in ("load", "load_all", "unsafe_load", "full_load"):
        loader = ast.unparse(node.args[1]) if len(node.args) > 1 else ""
        return None if loader.endswith("_Loader") else name  # a class of the file, derived from SafeLoader
    if name == "getattr" and isinstance(first, ast.Name) and first.id == "torch":
        return GETATTR
    if told.get("shell") is True:
        return "a shell"
    return None


def test_nothing_else_makes_code_of_a_text() -> None:
    found = {(file, reason) for file, node, name in calls() if (reason := wrong(name, node)) is not None}
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "code",
    [
        "eval(text)",
        "import_module(name)",
        "importlib.import_module(name + 'x')",
        "pickle.loads(data)",
        "torch.load(stream)",
        "torch.load(stream, weights_only=False)",
        "np.load(file)",
        "yaml.load(text, yaml.Loader)",
        "yaml.unsafe_load(text)",
        "getattr(torch, name)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_rule_sees_what_makes_code(code: str) -> None:
    node = ast.parse(code).body[0]
    assert isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    assert wrong(ast.unparse(node.value.func), node.value) is not None


# What names of others stand for ---------------------------------------------------------------------------------------


class Mine(Coordinatewise):
    """Somebody's own combiner, which tells when it is made."""

    made: ClassVar[list[int]] = []

    def __init__(self, k: int = 1) -> None:
        self.made.append(k)

    def combine(self, values: object, out: object) -> None:
        """Do nothing."""


OWN = f"{__name__}.Mine"


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("combine", OWN),
        ("combine", f"{OWN}:k=2"),
        ("combine", {"name": "os.system", "command": "true"}),
        ("combine", {"name": "trimmed_mean", "share": "os.system"}),
        ("combine", {"name": "trimmed_mean", "share": {"class_path": OWN}}),
        ("server", "this.s"),
        ("server", {"name": "sgd", "lr": "this.s"}),
        ("server", {"name": "sgd", "schedule": "this.s"}),
        ("server", {"name": "sgd", "schedule": {"name": "LambdaLR", "lr_lambda": "print"}}),
        ("server", {"name": "sgd", "schedule": {"name": "LambdaLR", "lr_lambda": "builtins.print"}}),
        ("server", {"name": "sgd", "device": "this:s"}),
        ("server", "__doc__"),
        ("server", "lr_scheduler"),
        ("algorithm", {"name": "fedavg", "combine": OWN}),
        ("algorithm", {"name": "diloco", "server": "this.s"}),
        ("algorithm", {"name": "fedavg", "client": {"name": "this.s"}}),
        ("algorithm", {"name": "streaming_diloco", "fragments": "9" * 5000}),
        ("combine", "x:" + "a=1," * 5000),
    ],
)
def test_names_of_others_are_those_of_the_registry(kind: str, spec: object) -> None:
    Mine.made.clear()
    sys.modules.pop("this", None)
    with pytest.raises(ConfigError):
        make(kind, spec, writer=Writer.OTHERS)
    assert Mine.made == [] and "this" not in sys.modules


def test_others_may_ask_for_what_xffl_has() -> None:
    assert make("combine", "trimmed_mean:share=0.3", writer=Writer.OTHERS) == TrimmedMean(0.3)
    spec = {"name": "torch.optim.AdamW", "lr": 0.1, "betas": [0.8, 0.9], "schedule": "StepLR:step_size=3,gamma=0.5"}
    assert "AdamW" in str(make("server", spec, writer=Writer.OTHERS))
    aggregator, _ = resolve_algorithm({"name": "fedadam", "lr": "1e-1"}, writer=Writer.OTHERS)
    assert aggregator["server"].rule.lr == 0.1
    assert make("combine", f"{OWN}:k=2", writer=Writer.USER).made[-1] == 2


def test_what_is_not_of_the_kind_is_not_called() -> None:
    Mine.made.clear()
    for spec in ("subprocess.getoutput:cmd=false", f"{__name__}.function", f"{__name__}.annotated"):
        with pytest.raises(
            ConfigError, match="must be a class, or a function that returns an object, of .*Combiner, got"
        ):
            make("combine", spec, writer=Writer.USER)
    assert Mine.made == []
    check_maker(returning, [Coordinatewise], "combine")


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("combine", "unannotated", "got a function that does not say what it returns; annotate it with what it ret"),
        ("combine", "annotated", "got a function that returns <class 'int'>; annotate it with what it returns"),
        ("combine", "Half", "got a class; derive it from xffl.aggregation.algorithms.combiners.Combiner$"),
        ("combine", "OWN", "got str; give the class or function that makes it"),
        ("server", "Half", "got a class; it lacks numbers and step$"),
    ],
)
def test_a_message_says_what_is_missing_with_the_same_words_on_all_ranks(kind: str, name: str, text: str) -> None:
    """An object's address, which its repr may have, differs between ranks."""
    with pytest.raises(ConfigError, match=text):
        make(kind, f"{__name__}.{name}", writer=Writer.USER)


class Half:
    """A server rule with one of its three methods."""

    def init(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}


def unannotated():  # type: ignore[no-untyped-def]
    return Mine()


def function() -> Mine | None:
    return Mine()


def annotated() -> int:
    return len(Mine().made)


def returning() -> Mine:
    return Mine()


def test_a_path_of_others_is_not_imported() -> None:
    with pytest.raises(ConfigError, match="this.s is named by a file or a peer"):
        import_named("this.s", "combine", writer=Writer.OTHERS)
    assert "this" not in sys.modules


# Plans of exports -----------------------------------------------------------------------------------------------------


def plan(algorithm: object = None, **options: object) -> RoundPlan:
    return RoundPlan(algorithm, options, writer=Writer.OTHERS)


@pytest.mark.parametrize("theirs", [plan(combine=OWN), plan({"name": "fedavg", "combine": {"name": OWN, "k": 3}})])
def test_a_name_of_ones_own_has_to_be_said_again(theirs: RoundPlan) -> None:
    with pytest.raises(CheckpointError, match="the exports ask for combine .*Mine.*give it yourself.*--combine NAME"):
        theirs.read()
    combine, server = theirs.read({"combine": OWN, "server": None})
    assert (combine, server) == (OWN, None)
    given = "mean" if theirs.algorithm is None else f"{OWN}:k=2"
    assert theirs.compare({"combine": given, "server": None})[0].startswith("the exports ask for combine ")


def test_the_same_name_and_a_builtin_one_are_no_difference() -> None:
    assert plan(combine={"name": OWN, "k": 3}).compare({"combine": f"{OWN}:k=3", "server": "sgd"}) == []
    assert plan(combine="median").compare({"combine": "mean", "server": None}) == []


def test_options_that_may_be_of_a_replaced_part_are_left_to_it() -> None:
    theirs = plan({"name": "diloco", "combine": OWN, "k": 3, "lr": 0.5})
    combine, server = theirs.read({"combine": OWN})
    assert combine == OWN and server["lr"] == 0.5
    with pytest.raises(CheckpointError, match="ask for combine"):
        plan({"name": "diloco", "combine": OWN}).read({"server": "sgd"})


def test_a_workflow_is_told_what_exports_may_not_name() -> None:
    mine = RoundPlan({"name": "diloco", "combine": {"name": OWN, "k": 3}}, {"server": f"{__name__}.made:lr=0.5"})
    words = mine.own_words()
    assert words == ("--combine", f"{OWN}:k=3", "--server", f"{__name__}.made:lr=0.5")
    theirs = RoundPlan(**mine.plain(), writer=Writer.OTHERS)
    assert theirs.compare(dict(zip(("combine", "server"), words[1::2], strict=True))) == []
    assert RoundPlan("fedadam", {"combine": "median"}).own_words() == ()
