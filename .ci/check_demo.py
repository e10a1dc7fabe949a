"""Check what ``make demo`` has written against what issue 2 asks of it; the last line counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree


def checks(folder: Path) -> dict[str, bool]:
    summary = json.loads((folder / "summary.json").read_text())
    iid, noniid = summary["settings"]["iid"], summary["settings"]["noniid"]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "IID: the federation reaches 97 % of centralized accuracy": iid["federated"] >= 0.97 * summary["centralized"],
        "non-IID: it beats every cell alone by 20 points": noniid["federated"] >= 0.20 + max(noniid["alone"]),
        "it took at most 120 seconds": summary["seconds"] <= 120,
        "every run left its metrics": {record["run"] for record in records} == {"federated", "alone", "centralized"},
        "the curves are a PNG": (folder / "curves.png").read_bytes().startswith(b"\x89PNG"),
        "the topology is an SVG": ElementTree.parse(folder / "topology.svg").getroot().tag.endswith("svg"),
    }


def main() -> int:
    results = checks(Path(sys.argv[1]))
    for name, passed in results.items():
        print(f"{'ok  ' if passed else 'FAIL'} {name}")
    failed = list(results.values()).count(False)
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
