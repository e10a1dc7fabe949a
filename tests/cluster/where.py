"""Print one JSON line of where this rank stands: no torch, so that tests of the detection are quick."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from xffl.cluster.environment import detect_environment

if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(detect_environment())) + "\n")
    sys.stdout.flush()
