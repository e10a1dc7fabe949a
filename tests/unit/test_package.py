"""The package as a whole: what it exports, what it loads, and whether its files say the same of it."""

from __future__ import annotations

import ast
import configparser
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import xffl
from tests.night import is_at_night
from xffl.extras import install_command

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "xffl"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(xffl.__path__, "xffl.") if "__main__" not in module.name
)
WITHOUT_TORCH = (
    "errors",
    "extras",
    "lazy",
    "callers",
    "naming",
    "checks",
    "json_text",
    "text_limits",
    "reading",
    "yaml_text",
    "files",
    "topology",
    "costs",
    "message_sizes",
    "cluster",
    "planning",
    "run_report",
    "workflow",
    "journal",
)
EXPORTS = {"DistributedState", "DistributedWorld", "session", "shard", "Aggregator", "FederatedScaling", "RoundReport"}
EXPORTS |= {"Topology", "adopt", "mean_over_cell", "no_sync"}


@pytest.fixture(scope="module")
def settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / "setup.cfg")
    return parser


def listed(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


# Exports --------------------------------------------------------------------------------------------------------------


def test_xffl_exports_what_the_two_scripts_need_and_the_errors() -> None:
    assert set(xffl.__all__) == EXPORTS | set(xffl.errors.__all__)
    assert xffl.__all__ == sorted(xffl.__all__)
    for name in xffl.__all__:
        assert getattr(xffl, name).__name__ == name
        assert name in dir(xffl)
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = xffl.nothing_of_this_name


def test_what_readers_see_is_what_is_loaded() -> None:
    """Type checkers read the imports under TYPE_CHECKING, and so does Python."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    guarded = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: str(node.module) for node in imports for alias in node.names}
    assert seen.keys() <= set(xffl.__all__)
    for name, module in seen.items():
        assert getattr(importlib.import_module(module), name) is getattr(xffl, name)


def test_every_public_name_exists_and_is_documented() -> None:
    for name in MODULES:
        module = importlib.import_module(name)
        assert module.__doc__, f"{name} has no docstring"
        for public in getattr(module, "__all__", ()):
            value = getattr(module, public)
            is_alias = isinstance(value, types.GenericAlias)  # a class for Python 3.10
            if not is_alias and (inspect.isclass(value) or inspect.isroutine(value)):
                assert value.__doc__, f"{name}.{public} has no docstring"
            else:
                assert public in documented_data(module.__file__), f"no string below {name}.{public} says what it is"


def documented_data(path: str | None) -> set[str]:
    """Return the names of a module that are assigned and followed by a string."""
    body = ast.parse(Path(str(path)).read_text()).body
    found = set()
    for node, after in pairwise(body):
        if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
            continue
        if isinstance(node, ast.Assign):
            found |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.AnnAssign):
            found.add(ast.unparse(node.target))
    return found


def test_every_module_says_what_is_public() -> None:
    modules = map(importlib.import_module, MODULES)
    assert [one.__name__ for one in modules if not hasattr(one, "__path__") and not getattr(one, "__all__", ())] == []


# What is loaded -------------------------------------------------------------------------------------------------------


def run_without(blocked: tuple[str, ...], code: str) -> str:
    """Run code in a process where importing the blocked packages fails."""
    hidden = "".join(f"sys.modules[{name!r}] = None; " for name in blocked)
    command = [sys.executable, "-c", f"import sys; {hidden}sys.path.insert(0, {str(ROOT)!r})\n{code}"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, cwd="/")
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_arithmetic_command_line_and_plan_do_without_torch() -> None:
    told = run_without(
        ("torch", "numpy", "matplotlib", "mpi4py"),
        "import xffl, xffl.cluster, xffl.planning\n"
        "from xffl.cli.main import main\n"
        "print(xffl.Topology(8, 4).cells, xffl.ConfigError.__name__)\n"
        "sys.exit(main(['plan', '--federated', '4,4', '--hsdp', '2', '--params', '8e9', '--link-gbps', '10']))",
    )
    assert told.startswith("2 ConfigError")
    assert "cell 1" in told


def test_rooms_without_torch_load_none() -> None:
    modules = [name for name in MODULES if name.split(".")[1] in (*WITHOUT_TORCH, "cli", "jobs")]
    modules.remove("xffl.cluster.doctor.exchange")  # only a child of the doctor loads it
    code = f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\nprint(len(sys.modules))"
    assert int(run_without(("torch", "matplotlib", "mpi4py"), code)) > len(modules)


def test_modules_of_the_package_are_there_whatever_was_imported_before() -> None:
    """In an isolated cell nothing had imported what a script of the manual names as ``xffl.aggregation``."""
    names = ["xffl.aggregation.ExpertTokens", "xffl.training.main", "xffl.planning.Link", "xffl.topology.Topology"]
    told = run_without((), f"import xffl\nprint({', '.join(f'{name}.__name__' for name in names)})")
    assert told.split() == ["ExpertTokens", "main", "Link", "Topology"]
    assert not hasattr(xffl, "no_such_module") and not hasattr(xffl, "_no_such_module")


def test_the_errors_are_the_tree_of_their_docstring() -> None:
    tree = re.findall(r"^ +[├└]── (\w+) +\((\w+)\)", str(xffl.errors.__doc__), re.MULTILINE)
    assert {name for name, _ in tree} | {"XfflError"} == set(xffl.errors.__all__)
    for name, builtin in tree:
        assert [base.__name__ for base in getattr(xffl.errors, name).__bases__] == ["XfflError", builtin]


# Files that must agree ------------------------------------------------------------------------------------------------


def test_the_version_has_one_source(settings: configparser.ConfigParser) -> None:
    assert settings["metadata"]["version"] == "attr: xffl.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", xffl.__version__)
    told = run_without(("torch",), "from xffl.cli.main import main\nmain(['--version'])")
    assert told.split()[-1] == xffl.__version__
    try:
        installed = importlib.metadata.version("xffl")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("xffl is not installed here, only on the path")
    assert installed == xffl.__version__


def test_every_console_script_exists(settings: configparser.ConfigParser) -> None:
    scripts = listed(settings["options.entry_points"]["console_scripts"])
    assert len(scripts) == 1
    for script in scripts:
        name, _, target = (part.strip() for part in script.partition("="))
        module, _, function = target.partition(":")
        assert name == "xffl"
        assert callable(getattr(importlib.import_module(module), function))


def test_every_room_has_its_import_contracts(settings: configparser.ConfigParser) -> None:
    rooms = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    layers = re.split(r"[\s|]+", settings["importlinter:contract:rooms"]["layers"].strip())
    assert rooms - {"__init__"} == set(layers)
    kept_free = set(listed(settings["importlinter:contract:torch"]["source_modules"]))
    rooms_kept_free = {name for name in kept_free if name.count(".") == 1}
    assert rooms_kept_free == {f"xffl.{room}" for room in WITHOUT_TORCH if room in rooms}


def test_constraints_pin_all_direct_dependencies_and_no_others(settings: configparser.ConfigParser) -> None:
    wanted = listed(settings["options"]["install_requires"])
    for extra in settings["options.extras_require"].values():
        wanted += listed(extra)
    names = {re.split(r"[<>=!~; ]", requirement)[0].lower() for requirement in wanted}
    lines = [line for line in listed((ROOT / "constraints.txt").read_text()) if not line.startswith("#")]
    pins = [re.fullmatch(r'([\w-]+)==([\w.]+)(; python_version >= "3\.11")?', line) for line in lines]
    assert all(pins), lines
    assert sorted(pin[1].lower() for pin in pins if pin) == sorted(names)


def test_every_pin_is_for_all_versions_of_python_that_it_is_asked_on(settings: configparser.ConfigParser) -> None:
    pythons = re.findall(r"Python :: (3\.\d+)", settings["metadata"]["classifiers"])
    assert pythons == ["3.10", "3.11", "3.12", "3.13"]
    installed = {distribution.name.lower(): distribution for distribution in importlib.metadata.distributions()}
    pins = [Requirement(line) for line in listed((ROOT / "constraints.txt").read_text()) if not line.startswith("#")]
    refused = [
        f"{pin.name} on Python {python}"
        for pin in pins
        for python in pythons
        if pin.name.lower() in installed and (pin.marker is None or pin.marker.evaluate({"python_version": python}))
        if installed[pin.name.lower()].version in pin.specifier  # in a row of make matrix it is another torch
        if f"{python}.9" not in SpecifierSet(installed[pin.name.lower()].metadata.get("Requires-Python", ""))
    ]
    assert refused == []
    assert {"torch", "numpy", "rich"} <= {pin.name for pin in pins} & set(installed)


def test_hints_install_what_an_extra_asks_for(
    settings: configparser.ConfigParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras = settings["options.extras_require"]
    for extra, text in extras.items():
        pip, install, *packages = shlex.split(install_command(extra))
        assert (pip, install) == ("pip", "install")
        assert [Requirement(package) for package in packages] == [Requirement(line) for line in listed(text)]
    assert named_extras() <= set(extras) and {"deepspeed", "hf", "privacy", "report"} <= named_extras()

    def from_the_checkout(extra: str) -> None:
        assert shlex.split(install_command(extra)) == ["pip", "install", "-e", f"{ROOT}[{extra}]"]

    from_the_checkout("newer_than_what_is_installed")
    monkeypatch.setattr(importlib.metadata.Distribution, "discover", lambda **_: iter(()))
    from_the_checkout("hf")


def named_extras() -> set[str]:
    """Return the extras that the package's hints name, in a call or in a constant NEED that a call spreads."""
    named = set()
    for source in [source for path in SOURCES if "from xffl.extras import" in (source := path.read_text())]:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("install_command", "optional_import"):
                first = node.args[0]
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("NEED", "EXTRAS"):
                first = node.value.elts[0] if isinstance(node.value, ast.Tuple) else node.value
            else:
                continue
            if isinstance(first, (ast.Constant, ast.Dict)):
                values = first.values if isinstance(first, ast.Dict) else [first]
                named |= {value.value for value in values if isinstance(value, ast.Constant)}
    return named


def test_nothing_is_installed_from_an_index_that_has_no_xffl() -> None:
    """Xffl is installed from its repository: ``pip install -e '.[hf]'``."""
    folders = ("xffl", "docs", "examples", "workflows", "benchmarks", "tests")
    texts = [path for name in folders for path in (ROOT / name).rglob("*") if path.is_file()]
    texts += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "constraints.txt")]
    texts = [path for path in texts if path.suffix in (".py", ".md", ".rst", ".txt", ".def", ".sh", ".yaml", "")]
    assert len(texts) > 300
    wrong = re.compile(r"pip install\s+(-\S+\s+)*['\"]?xff[l]|\bxff[l]\[|project/xff[l]")
    assert [(path.name, told[0]) for path in texts if (told := wrong.search(path.read_text()))] == []


def test_types_are_shipped(settings: configparser.ConfigParser) -> None:
    assert "py.typed" in listed(settings["options.package_data"]["xffl"])
    assert (PACKAGE / "py.typed").exists()


def test_the_readme_names_what_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "lint", "docs", "bench"} <= targets
    assert {"demo", "test", "docs"} <= set(re.findall(r"\bmake (\w+)", readme)) <= targets
    first_screen = readme[: readme.index("## ")]
    for promise in ("make demo", "xffl.session(", "docs/_static/topology.svg"):
        assert promise in first_screen
    tree = re.findall(r"^  (\w+(?:/|\.py)) ", readme, re.MULTILINE)
    rooms = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    rooms |= {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    assert set(tree) == rooms


def test_the_readme_lists_rooms_below_those_that_they_import(settings: configparser.ConfigParser) -> None:
    layers = settings["importlinter:contract:rooms"]["layers"].strip().splitlines()
    height = {room.strip(): -place for place, line in enumerate(layers) for room in line.split("|")}
    tree = re.findall(r"^  (\w+)(?:/|\.py) ", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [height[room] for room in tree] == sorted(height[room] for room in tree)


PAGES = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/**/README.md")])


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/_build")])
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert target.startswith("https://") or ((ROOT / page).parent / target).exists(), target


def test_every_feature_has_a_page_and_a_test() -> None:
    rows = re.findall(
        r"- (.+)\n     - :doc:`/(.+)`\n     - ``(.+)::(.+)``", (ROOT / "docs/reference/features.rst").read_text()
    )
    assert len(rows) == (ROOT / "docs/reference/features.rst").read_text().count("\n   * - ") - 1  # without the head
    for feature, page, file, test in rows:
        assert (ROOT / "docs" / f"{page}.rst").is_file(), feature
        text = (ROOT / "tests" / file).read_text()
        assert f"\ndef {test}(" in text, feature
        is_long = is_at_night(file, test) or bool(re.search(rf"\n@pytest\.mark\.long\b.*\n(@.*\n)*def {test}\(", text))
        assert feature.endswith(" (nightly)") == is_long, feature


@pytest.mark.parametrize("page", ["README.md", "docs/first_run.rst"])
def test_the_shown_script_is_python_and_uses_what_is_exported(page: str) -> None:
    text = (ROOT / page).read_text()
    start = text.index("import torch, xffl")
    lines = text[start:].splitlines()
    end = next(i for i, line in enumerate(lines) if i > 2 and line and (line.startswith("```") or line[0] not in " "))
    indent = start - text.rindex("\n", 0, start) - 1
    script = "\n".join(line[indent:] if i else line for i, line in enumerate(lines[:end]))
    used = {node.attr for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Attribute) and on_xffl(node)}
    assert {"session", "shard", "FederatedScaling"} <= used <= set(xffl.__all__)


def on_xffl(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "xffl"


# The first hour with a GPU --------------------------------------------------------------------------------------------

BARE = "cryptography,datasets,deepspeed,flwr,opacus,mlflow,sqlalchemy,alembic,wandb,torchao,expecttest"
"""What ``docs/install.rst`` does not ask a machine with a GPU to have."""


def test_tests_for_gpus_are_collected_with_what_a_machine_with_a_gpu_has() -> None:
    marked = re.compile(r"^(?:@|pytestmark = \[?)pytest\.mark\.gpu\b", re.MULTILINE)
    files = (path for path in (ROOT / "tests").rglob("test_*.py") if marked.search(path.read_text()))
    (line,) = re.findall(r"^GPU_TESTS = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(line.split()) == sorted(str(path.relative_to(ROOT)) for path in files)
    words = ["-m", "pytest", "-p", "tests.hidden", "-m", "gpu", "-q", "-p", "no:cacheprovider", *line.split()]
    ran = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=os.environ | {"HIDDEN": BARE}, capture_output=True, text=True
    )
    # They run there; without a GPU each of them says so.
    assert ran.returncode == 0, ran.stdout
    assert sum(map(int, re.findall(r"(\d+) (?:passed|skipped)", ran.stdout.splitlines()[-1]))) >= 42, ran.stdout


# House rules that no linter knows -------------------------------------------------------------------------------------


READ_WITHOUT_LIMIT = {
    "no files": {
        "page: answer.read()",  # that of a lighthouse, which was received whole, up to a limit
        "monitors: self._clock.read()",
        "progress: run.clock.read()",
        "progress: clock.read()",
        "master_weights: self._masters.read()",
        "master_weights: masters.read()",
        "deepspeed: masters.read()",
        "first_model: masters.read()",
        "exports: self.read()",
        "view: self.read()",
        "workflow: asked.plan.read()",
    },
    "files of the package": {
        "probe: file.read_bytes()",
        "misc: file.read_text(encoding='utf-8')",
        "documents: (templates / name).read_text(encoding='utf-8')",
        "documents: (templates / 'README.md').read_text(encoding='utf-8')",
        "submit: (files('xffl.cluster.slurm') / 'templates' / TEMPLATE).read_text(encoding='utf-8')",
        "page: Path(__file__).with_name('page.html.j2').read_text(encoding='utf-8')",
        "page: vector.read_text(encoding='utf-8')",  # a picture that was just drawn, in a folder of its own
    },
    "files of the kernel and the administrator": {
        "probe: path.read_text()",
        "probe: (link / 'type').read_text()",
        "probe: (link / 'uevent').read_text()",
        "probe: Path('/proc/self/mounts').read_text()",
        "run_lock: Path('/proc/uptime').read_text()",
        "run_lock: Path(f'/proc/{process}/stat').read_text(errors='replace')",
        "run_lock: Path('/etc/machine-id').read_text(errors='replace')",
        "network: boot_id.read_text()",
        "hardware: _STATUS.read_text()",
        "hardware: _CPUINFO.read_text()",
        "compare: _EPHEMERAL.read_text()",
        "network: (folder / 'operstate').read_text()",
        "network: (folder / 'speed').read_text()",
        "network: (folder / 'flags').read_text()",
        "affinity: (topology / 'physical_package_id').read_text()",
        "affinity: (topology / 'core_id').read_text()",
    },
    "what the user trains on, of any length": {
        "tokens: Path(path).read_text(encoding='utf-8-sig')",
    },
}
"""Calls that read all that is there, by module and as ``ast.unparse`` writes them, and why they may."""


def _has_no_limit(call: ast.Call) -> bool:
    """Tell whether a call reads a whole file, or a whole line, however long that is."""
    if isinstance(call.func, ast.Name):
        return call.func.id in ("read_bytes", "read_text") and len(call.args) == 1 and not call.keywords
    if not isinstance(call.func, ast.Attribute) or call.args:
        return False
    if call.func.attr in ("read_bytes", "read_text"):
        return True
    return call.func.attr in ("read", "readline", "readlines") and not call.keywords


def test_one_rank_writes_for_all_of_a_job_also_where_its_cells_are_isolated() -> None:
    # The world of such a rank is its cell, and each cell has a rank 0: who speaks or writes for all of the job is asked
    # by is_first_of_job, or by the rank in a group of all of the job's ranks.
    asks = re.compile(r"(state\.rank|get_rank\(\)) (==|!=) 0")
    files = {str(path.relative_to(ROOT)) for path in SOURCES if asks.search(path.read_text())}
    apart = ("xffl/elastic/", "xffl/aggregation/federations/elastic.py", "xffl/distributed/startup/lone_cell.py")
    trainer = ("xffl/training/mixins/", "xffl/training/run_directory.py")  # refuses isolated cells
    before = ("xffl/distributed/session.py",)  # a cell's world compares what it runs before it has met the others
    bench = ("xffl/aggregation/bench.py",)  # starts its own ranks, in one world
    warns = ("xffl/checkpoint/damage.py",)  # in each cell, of what it does not take for a checkpoint
    assert {file for file in files if not file.startswith((*apart, *trainer, *before, *bench, *warns))} == set()


def test_files_that_others_may_have_written_are_read_up_to_a_limit() -> None:
    calls = {
        f"{path.stem}: {ast.unparse(node)}"
        for path in SOURCES
        if path != PACKAGE / "files.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _has_no_limit(node)
    }
    assert calls == set().union(*READ_WITHOUT_LIMIT.values()), "use read_bytes or read_text of xffl.files with a limit"


def test_digits_are_those_of_ascii() -> None:
    """Texts become numbers by ``decimal`` and ``real`` of xffl.checks; Python reads the digits of every script."""
    found = []
    for path in SOURCES:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        calls = [node for node in nodes if isinstance(node, ast.Call) and "re.ASCII" in map(ast.unparse, node.args)]
        in_ascii = {id(part) for call in calls for part in ast.walk(call)}
        for node in nodes:
            is_test = isinstance(node, ast.Attribute) and node.attr in ("isdigit", "isdecimal", "isnumeric")
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in in_ascii
            if (is_test and path.name != "checks.py") or (is_text and r"\d" in node.value):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert found == []


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a module that run when it is imported: all but the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        is_body = isinstance(node, ast.FunctionDef) and child in node.body
        if not (is_body or isinstance(node, ast.Lambda)):
            yield child
            yield from _run_at_import(child)


def test_no_module_keeps_the_environment_that_was_there_at_its_import() -> None:
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        at_import = (part for part in _run_at_import(tree) if isinstance(part, ast.expr))
        lines = [part.lineno for part in at_import if "os.environ" in _name(part)]
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "os"]
        names = {alias.name for node in imports for alias in node.names}
        assert lines == [] and "environ" not in names, f"{path}: take ENVIRON"


def _name(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Attribute) else ""


def test_contributing_says_where_things_are() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| .+ \| \[(.+)\]\(\1\) \| `(\w+)` \|$", text, re.MULTILINE)
    assert len(rows) >= 15 and text.count("](xffl/") == len(rows)
    for file, name in rows:
        tree = ast.parse((ROOT / file).read_text())
        names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert name in names, f"{file} has no {name}"


PRIVATE = {"torch.distributed.tensor._random", "torch.utils._python_dispatch.TorchDispatchMode"}
"""What has no public way: how torch makes up random numbers for DTensors on GPUs, and what sees every operator."""


def test_files_are_named_by_what_they_do_and_use_public_torch() -> None:
    vague = {"utils", "common", "helpers", "custom", "processing"}
    for path in SOURCES:
        assert not vague & set(path.relative_to(ROOT).with_suffix("").parts), path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = getattr(node, "module", None) or ""
                names = [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
                for name in names:
                    is_private = name.startswith("torch") and "._" in name and name not in PRIVATE
                    assert not is_private, f"{path}: {name} is private to torch"


def test_only_worlds_and_pretended_gpus_use_private_parts_of_torch() -> None:
    private = re.compile(r"^\s*(?:from|import) torch[\w.]*\._\w+", re.MULTILINE)
    users = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py") if private.search(path.read_text())}
    assert users <= {Path("tests/worlds.py"), Path("tests/nccl/gpus.py"), Path("tests/nccl/races.py")}


WORKAROUND = re.compile(
    r"\bctypes\b|\bmock\b|\b_getframe\b|\btorch\._C\b|\b_execution_engine\b|(listdir|readlink)\(f?.?/proc/self/fd\b"
)
"""What only xffl/compat does: calls of the C library, patches of other packages, private names of torch."""


def test_workarounds_stand_in_their_room() -> None:
    outside = [path for path in SOURCES if path.parent != PACKAGE / "compat"]
    lines = [f"{path}: {line}" for path in outside for line in path.read_text().splitlines() if WORKAROUND.search(line)]
    assert lines == [], "make it a function of xffl/compat, with a test"


VARIADIC = frozenset({"add_row", "chain", "join", "max", "min", "print", "warning", "zip"})
"""Functions of other packages that take any number of arguments, all alike."""

IN_ORDER = frozenset({"show"})
"""What the caller was given as a function, of whose parameters only the order is known."""


@lru_cache
def variadic_names() -> set[str]:
    """Return the names of the package's functions that take any number of arguments."""
    functions = (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())))
    names = {node.name for node in functions if isinstance(node, ast.FunctionDef) and node.args.vararg is not None}
    return names - {"__init__"}  # each class has one of its own


def unnamed_arguments(call: ast.Call) -> tuple[str, int]:
    """Return what is called in the end, and how many arguments it is given without their names."""
    name = ast.unparse(call.func).rpartition(".")[2]
    if name in ("partial", "submit") and call.args:
        return ast.unparse(call.args[0]).rpartition(".")[2], len(call.args) - 1
    return name, len(call.args)


def calls_without_names(source: str) -> list[str]:
    """Return the calls of a source that give more than four arguments without their names, of whatever package."""
    unnamed = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name, count = unnamed_arguments(call)
        if count > 4 and name not in variadic_names() | VARIADIC | IN_ORDER:
            unnamed.append(f"line {call.lineno}: {ast.unparse(call)[:80]}")
    return unnamed


def test_calls_with_many_arguments_name_them() -> None:
    unnamed = [f"{path}, {line}" for path in SOURCES for line in calls_without_names(path.read_text())]
    assert unnamed == [], "name the arguments"


def test_unnamed_arguments_are_found_in_every_kind_of_call() -> None:
    source = "\n".join(
        (
            "TCPStore(host, port, None, False, timeout)",  # another package's class
            "pool.submit(TCPStore, host, port, None, False, timeout)",
            "partial(self.write, lines, show, line, rank, begun)",
            "super().__init__(one, two, three, four, five)",
            "state.method(one, two, three, four, five)",
            "partial(self.write, lines, show, line, rank=rank, begun=begun)",
            "table.add_row(one, two, three, four, five)",
        )
    )
    assert [line.partition(":")[0] for line in calls_without_names(source)] == [f"line {n}" for n in range(1, 6)]


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "benchmarks").glob("*.py")))
def test_benchmarks_import_what_there_is(script: str) -> None:
    """Nothing else runs them, so that a name which has moved would be noticed only by who measures."""
    for node in ast.walk(ast.parse((ROOT / "benchmarks" / script).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "xffl":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                is_module = (
                    importlib.util.find_spec(f"{node.module}.{alias.name}") if hasattr(module, "__path__") else None
                )
                assert hasattr(module, alias.name) or is_module, f"{node.module}.{alias.name}"
