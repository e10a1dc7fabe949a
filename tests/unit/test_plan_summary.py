"""The end of ``xffl plan``: three lines and a suggestion, whose effect is that of the option it names."""

from __future__ import annotations

import re

import pytest

from xffl.cli.main import main

LABELS = ("Round", "Training", "Memory", "Try")
FACILITIES = "--federated 8,8 --hsdp 4 --params 1e9 --simulate --link-gbps 1 --link-ms 10 --step-s 1 --every 500"
RACKS = (
    "--federated 16 --world 64 --hsdp 4 --params 8e9 --simulate --link-gbps 25 --own-links --link-ms 0.05 --step-s 1 "
    "--every 20 --backend nccl"
)
LONG = "--federated 4,4 --params 8e9 --simulate --link-gbps 10 --own-links --link-ms 25 --step-s 1 --every 100"


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("XFFL_FEDERATED", "XFFL_HSDP"):
        monkeypatch.delenv(name, raising=False)


def planned(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", *words.split()]) == 0
    return capsys.readouterr().out


def ending(told: str) -> dict[str, str]:
    """Return the last four lines by their labels; an empty line stands before them."""
    *_, before, first, second, third, last = told.splitlines()
    assert before == ""
    pairs = [tuple(line.split(maxsplit=1)) for line in (first, second, third, last)]
    assert tuple(label for label, _ in pairs) == LABELS
    return dict(pairs)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--federated 4,4 --hsdp 2",
            ("as many bytes as the model", "needs the model's size", "not counted", "--params 8e9 --link-gbps 10:"),
        ),
        ("--federated 2,2,2,2", ("1.5 times the bytes", "not forecast", "not counted", "--params")),
        ("--world 1", ("none: there is one cell", "no time", "not counted", "--params 8e9:")),
        (
            "--federated 8,8,8 --hsdp 4 --params 1e9",
            ("each cell sends 5.33 GB", "the link's rate", "5 GB on a rank", "--simulate --link-gbps 10 --link-ms"),
        ),
        (
            "--federated 8,8 --hsdp 4 --params 1e9 --link-gbps 1",
            ("sends 4 GB, in 32 s", "52.8 min of local steps", "5 GB on a rank, beside", "--simulate --link-ms"),
        ),
        (FACILITIES, ("takes 32.09 s", "94.0 % of the time", "5 GB on a rank", '--codec int8 (codec="int8"): a round')),
        (RACKS, ("takes 4 s", "83.3 %", "40 GB", "--rails (rails=True): a round of 1.123 s instead of 4 s")),
        (f"{LONG} --bucket-mib 0.5", ("takes 24.54 s", "80.3 %", "40 GB", "--bucket-mib 4 (bucket_bytes=4 * 2**20)")),
        (
            "--world 8 --params 8e9 --strategy ddp --layers 32",
            ("none", "in each forward and backward pass", "128 GB", "--strategy fsdp: 20 GB on a rank instead of 128"),
        ),
        ("--world 8 --params 8e9 --strategy fsdp", ("none", "a rank sends", "80 GB", "nothing: one cell")),
        ("--world 8 --params 9e9 --strategy fsdp", ("none", "a rank sends", "90 GB", "--layers N")),
        (
            "--world 4 --params 1e9 --strategy ddp --optimizer adafactor",
            ("none", "a rank sends", "adafactor needs the model's --width", "nothing"),
        ),
    ],
)
def test_a_plan_ends_with_three_lines_and_one_suggestion(
    words: str, expected: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    found = ending(planned(words, capsys))
    for label, part in zip(LABELS, expected, strict=True):
        assert part in found[label], (label, found[label])


@pytest.mark.parametrize(
    "words", [FACILITIES, RACKS, f"{LONG} --bucket-mib 0.5", FACILITIES.replace("500", "4"), f"{RACKS} --in-place"]
)
def test_suggestions_have_the_effect_that_they_name_until_nothing_is_left(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = []
    for _ in range(6):
        found = ending(planned(words, capsys))
        if found["Try"].startswith("nothing"):
            break
        option = re.match(r"(--[a-z-]+)( \d+| int8)? \(", found["Try"])
        assert option is not None, found["Try"]
        assert option[0] not in taken
        taken.append(option[0])
        if option[1] in words:
            words = re.sub(rf"{option[1]} \S+", f"{option[1]}{option[2]}", words)
        else:
            words += f" {option[1]}{option[2] or ''}"
        after = ending(planned(words, capsys))
        share = re.search(r"training (\S+ %)$", found["Try"])
        assert share is not None
        assert after["Training"].startswith(share[1])
        if (shorter := re.search(r"a round of (\S+ m?s) instead", found["Try"])) is not None:
            assert f"takes {shorter[1]}," in after["Round"]
    assert found["Try"].startswith("nothing: rounds take"), taken
    assert taken


def test_assumptions_are_listed_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{FACILITIES} --layers 16"
    short = planned(words, capsys)
    long = planned(f"{words} --assumptions", capsys)
    assert "Assumed:" not in short
    assert long.count("Assumed:") == 3
    assert ending(short) == ending(long)
    assert [line for line in short.splitlines() if line not in long.splitlines()] == []
