"""The end of ``xffl plan``: three lines and a suggestion, whose effect is that of the option it names."""

from __future__ import annotations

import re

import pytest

from xffl.cli.main import main
from xffl.planning.text import seconds_text

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
        (FACILITIES, ("takes 32.08 s", "94.0 % of the time", "5 GB on a rank", '--codec int8 (codec="int8"): a round')),
        (RACKS, ("takes 4 s", "83.3 %", "40 GB", "--rails (rails=True): a round of 1.123 s instead of 4 s")),
        (f"{LONG} --bucket-mib 0.5", ("takes 48.22 s", "67.5 %", "40 GB", "--bucket-mib 4 (bucket_bytes=4 * 2**20)")),
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
        share = re.search(r"training (\S+ %)(?:; memory (\S+ GB) instead of (\S+ GB))?$", found["Try"])
        assert share is not None
        assert found["Memory"].startswith(share[3] or found["Memory"])
        assert after["Memory"].startswith(share[2] or found["Memory"])
        assert after["Training"].startswith(share[1])
        if (shorter := re.search(r"a round of (\S+ m?s) instead", found["Try"])) is not None:
            assert f"takes {shorter[1]}," in after["Round"]
    assert found["Try"].startswith("nothing: rounds take"), taken
    assert taken


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (12.3e-6, "12.3 us"),
        (999.4e-6, "999 us"),
        (999.9e-6, "1 ms"),
        (0.0999, "99.9 ms"),
        (0.99951, "0.9995 s"),
        (32.0912, "32.09 s"),
        (9999.7, "10000 s"),
        (123456.7, "123457 s"),
    ],
)
def test_seconds_are_written_without_exponents(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_more_memory_is_part_of_the_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--federated 4,4 --params 8e9 --simulate --link-gbps 10 --link-ms 10 --step-s 1 --every 10"
    found = ending(planned(words, capsys))
    assert found["Try"].startswith("--codec int8 ")
    assert found["Try"].endswith("; memory 64 GB instead of 40 GB")
    found = ending(planned(f"{words} --codec int8", capsys))
    assert found["Memory"].startswith("64 GB ")
    assert "memory" not in found["Try"]


def test_no_cells_are_suggested_where_data_parallelism_costs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--federated 8,4 --hsdp 1 --params 1e8 --simulate --link-gbps 100 --link-ms 1 --step-s 0.1 --every 5"
    assert ending(planned(words, capsys))["Try"] == "no cells: data parallelism over all ranks, training 100.0 %"


@pytest.mark.parametrize("option", ["--params", "--link-gbps", "--step-s"])
def test_what_is_no_number_is_said_in_words(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--federated", "4,4", option, "8 gibbons"])
    told = capsys.readouterr().err
    kind = "no whole number; give one such as 12" if option == "--params" else "no number; give one such as 25 or 8e9"
    assert f"'8 gibbons' is {kind}" in told
    assert "<class" not in told


def test_assumptions_are_listed_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{FACILITIES} --layers 16"
    short = planned(words, capsys)
    long = planned(f"{words} --assumptions", capsys)
    assert "Assumed:" not in short
    assert long.count("Assumed:") == 3
    assert ending(short) == ending(long)
    assert [line for line in short.splitlines() if line not in long.splitlines()] == []
