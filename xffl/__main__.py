"""``python -m xffl``, or ``python xffl/__main__.py``: the command line, also where the package is not installed."""

import sys

if __name__ == "__main__":
    # Python has put a folder first on the path, with -m the working folder: a file there may be called as one of
    # Python's own modules is. Under -P or PYTHONSAFEPATH (Python 3.11 and later) it has put none.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    if "xffl" not in sys.modules:  # run by its path
        from importlib.util import find_spec
        from os.path import dirname

        if find_spec("xffl") is None:
            sys.path.append(dirname(dirname(__file__)))
    from xffl.cli.main import main

    sys.exit(main())
