"""The mutants that ``python -m tests.mutants`` tries."""

from __future__ import annotations

import ast

from tests.mutants import FLIPS, MODULES, REPO, files_of_tests, mutants

TEXT = """\
def f(a, b, ä):
    if (a < b) != ä:  # is it < or ==
        return "ä", a not in (b), 1 <= a <= (
            b
        )
    return [x for x in a if x is not None]
"""


def test_each_comparison_is_flipped_once() -> None:
    flipped = list(mutants("module.py", TEXT))
    wanted = {
        "a < b != ä": TEXT.replace("!= ä", "== ä"),
        "a < b": TEXT.replace("(a < b)", "(a >= b)"),
        "a not in b": TEXT.replace("a not in (b)", "a in (b)"),
        "1 <= a": TEXT.replace("1 <= a", "1 > a"),
        "a <= b": TEXT.replace("a <= (", "a > ("),
        "x is not None": TEXT.replace("is not None", "is None"),
    }
    assert {mutant.text for mutant in flipped} == set(wanted.values())
    assert [mutant.line for mutant in flipped] == sorted(mutant.line for mutant in flipped)
    for mutant in flipped:
        ast.parse(mutant.text)


def test_all_operators_have_another_that_says_the_opposite() -> None:
    assert set(FLIPS) == set(ast.cmpop.__subclasses__())
    for old, new in FLIPS.values():
        assert (new, old) in FLIPS.values()


def test_the_modules_are_there_and_have_tests() -> None:
    for module in MODULES:
        assert (REPO / module).is_file()
        assert files_of_tests(module)
