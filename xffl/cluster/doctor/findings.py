"""What a check says: a line with a verdict and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["ERROR", "OK", "WARNING", "Finding", "Report", "in_words", "merge"]

OK = "ok"
"""All is well."""
WARNING = "warning"
"""The job may run, but not as well as it could."""
ERROR = "error"
"""The job will not run, or not rightly."""


@dataclass(frozen=True)
class Finding:
    """The verdict of one check on one host, or on all."""

    check: str
    """What was looked at, such as ``clock``."""
    status: str
    """``ok``, ``warning`` or ``error``."""
    text: str
    """What was found."""
    advice: str = ""
    """What to do about it; empty where all is well."""
    host: str = ""
    """Where it was found; empty for what concerns all hosts."""


@dataclass(frozen=True)
class Report:
    """Everything that the doctor has to say."""

    findings: tuple[Finding, ...]
    hosts: tuple[str, ...] = ()
    """The hosts that were looked at."""
    ranks: int = 1

    @property
    def exit_code(self) -> int:
        """1 where there is an error, else 0."""
        return int(any(finding.status == ERROR for finding in self.findings))

    def count(self, status: str) -> int:
        """Count the findings of a verdict."""
        return sum(finding.status == status for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return the report as ``xffl doctor --json`` prints it."""
        return {
            "hosts": list(self.hosts),
            "ranks": self.ranks,
            "findings": [asdict(finding) for finding in self.findings],
            "counts": {status: self.count(status) for status in (OK, WARNING, ERROR)},
            "exit_code": self.exit_code,
        }


def merge(findings: Iterable[Finding], hosts: Sequence[str]) -> tuple[Finding, ...]:
    """Write what was found alike on several hosts as one finding.

    :param findings: Findings, each of one host or of all.
    :param hosts: All hosts.
    :return: The findings in their order of appearance; ``host`` names several hosts then, or ``all N hosts``.
    """
    places: dict[Finding, list[str]] = {}
    for finding in findings:
        places.setdefault(replace(finding, host=""), []).append(finding.host)
    merged = []
    for finding, named in places.items():
        at = [host for host in dict.fromkeys(named) if host]
        if len(hosts) > 1 and set(at) >= set(hosts):
            merged.append(replace(finding, host="both hosts" if len(hosts) == 2 else f"all {len(hosts)} hosts"))
        else:
            merged.append(replace(finding, host=in_words(at)))
    order = list(dict.fromkeys(finding.check for finding in merged))
    return tuple(sorted(merged, key=lambda finding: order.index(finding.check)))


def in_words(names: Sequence[str], shown: int = 6) -> str:
    """Write names with commas, the first ones only where there are many."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
