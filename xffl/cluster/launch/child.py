"""Processes of xffl's own, started so that the working folder is not on their path: ``python child.py MODULE [words]``.

``python -m MODULE`` looks for every module in the working folder first, so that a ``random.py`` or ``select.py`` there
would be imported in place of Python's own. This file is run by its path, as a script is, and takes the folder that
Python has put on the path for it out again before it imports anything.
"""

import sys

__all__ = ["child_command", "main"]


def child_command(module: str) -> list[str]:
    """Return the words that run ``main`` of a module of xffl, or of an installed package, in a process of its own."""
    return [sys.executable, __file__, module]


def main() -> None:
    """Import the module that the first word names, and leave with what its ``main`` returns."""
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 and later, with -P or PYTHONSAFEPATH: it puts none
        del sys.path[0]
    # Not before: these are what a file in the folder could stand in for.
    from importlib import import_module
    from importlib.util import find_spec
    from os.path import dirname

    if find_spec("xffl") is None:  # it runs from a folder where it is not installed
        sys.path.append(dirname(dirname(dirname(dirname(__file__)))))
    module = sys.argv.pop(1)
    sys.exit(import_module(module).main())


if __name__ == "__main__":
    main()
