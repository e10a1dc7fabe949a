"""``python -m xffl``: the command line, also where the package is not installed."""

from __future__ import annotations

import sys

from xffl.cli.main import main

sys.exit(main())
