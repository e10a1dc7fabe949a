"""A report in a real browser: all pictures are there, nothing is complained about, nothing is fetched.

    python -m tests.cluster.test_report_browser RUN/pictures/report.html docs/_static/report.png

makes the screenshot of the manual from the report of a run.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import math
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import require
from xffl.run_report import write_report

REPO = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
START = 1.79e9
PICTURES = """JSON.stringify([...document.images].map(image => ({
  alt: image.alt, is_whole: image.complete, natural: image.naturalWidth * image.naturalHeight,
  shown: image.getBoundingClientRect().width * image.getBoundingClientRect().height })))"""
COLOURS = """(() => { const style = getComputedStyle(document.body);
  return JSON.stringify([style.backgroundColor, style.color].map(text => text.match(/\\d+/g).map(Number))); })()"""
WIDEST = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


class Page:
    """A page of a headless browser, spoken to over two pipes as the DevTools do: no port, no library."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._buffer = b""
        self._calls = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Network", "Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method and return its result; events that arrive meanwhile are kept."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._calls:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, file: Path) -> None:
        """Open a file, and wait until it and its pictures are there."""
        self.events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        while not self.told("Page.loadEventFired"):
            self.events.append(self._next())

    def told(self, method: str) -> list[dict[str, Any]]:
        """Return what events of a kind have told since a page was opened."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def resize(self, width: int, height: int) -> None:
        """Give the page another size, in pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self) -> bytes:
        """Return what is seen, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + DEADLINE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser has said nothing for {DEADLINE_S} s"
            part = os.read(self._reading, 1 << 16)
            assert part, "the browser has gone"
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message


@contextlib.contextmanager
def open_browser() -> Iterator[Page]:
    """Start a headless Chromium with a profile of its own, and end it with all its processes."""
    program = shutil.which("chromium")
    require(program, "Chromium (chromium)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [str(program), "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        command += ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"]
        command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        # The browser reads from 3 and writes to 4; ends above these are not closed by putting them there.
        pipes = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for pair in (os.pipe(), os.pipe()) for end in _given(pair)]
        to_read, to_write, from_read, from_write = pipes

        def place() -> None:
            os.dup2(to_read, 3)
            os.dup2(from_write, 4)

        browser = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=place,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(from_write)
        try:
            yield Page(from_read, to_write)
        finally:
            os.close(to_write)
            os.close(from_read)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()


def _given(pair: tuple[int, int]) -> Iterator[int]:
    """Give the ends of a pipe, and close each when a copy of it was made."""
    for end in pair:
        yield end
        os.close(end)


def write_example(folder: Path, *, seed: int = 0, every: int = 20, delay: int = 0, algorithm: str = "fedavg") -> Path:
    """Write a run folder of two cells that looks like a real one."""
    draw = random.Random(seed)
    steps, model = 400, 17.2e6
    files: dict[str, list[dict[str, Any]]] = {}
    now = START + 4.0
    for step in range(2, steps + 1, 2):
        now += 0.22 + 0.01 * draw.random()
        place = {"step": step, "epoch": step // 100, "samples": 32 * step}
        base = 0.9 + 2.4 * math.exp(-step / 90)
        rate = 3e-4 * min(1.0, step / 40) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for cell in range(2):
            values = {
                "train/loss": base + 0.05 * cell + 0.08 * draw.gauss(0, 1) * math.exp(-step / 300),
                "train/learning_rate": rate,
                "throughput/tokens_per_s": 41000 + 900 * draw.gauss(0, 1),
                "memory/resident_bytes": 1.31e9 + 2e6 * (cell + 1) * step / steps,
            }
            if step % 40 == 0:
                values |= {"val/loss": base + 0.12 + 0.02 * cell, "val/accuracy": 0.93 - 0.7 * math.exp(-step / 110)}
            files.setdefault(f"metrics/cell_{cell}.jsonl", []).append({"time": now, **place, "values": values})
        if step % every:
            continue
        number, blocking = step // every, 0.62 + 0.06 * draw.random()
        seconds = blocking + 0.115 * delay
        now += 0.0 if delay else blocking
        phases = {"vote": 0.02, "pack": 0.03, "encode": 0.04, "across": blocking - 0.2, "combine": 0.05, "home": 0.04}
        phases |= {"commit": 0.02, **({"wait": 0.05} if delay else {})}
        norms = [3 * math.exp(-number / 12) + 0.2 * draw.random() + 0.3 * cell for cell in range(2)]
        for cell in range(2):
            line = {"time": now, **place, "round": number, "bytes_across": model, "bytes_home": model}
            line |= {"seconds": seconds, "phases": phases, "hidden": 0.09, "dropped": [], "steps": [every, every]}
            files.setdefault(f"rounds/cell_{cell}.jsonl", []).append({**line, "update_norms": norms})
        values = {
            "train/loss": base + 0.02,
            "val/loss": base + 0.08,
            "val/accuracy": 0.95 - 0.7 * math.exp(-step / 105),
        }
        files.setdefault("metrics/federation.jsonl", []).append({"time": now, **place, "values": values})
    for name, lines in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "checkpoints" / "final").mkdir(parents=True)
    (folder / "checkpoints" / "latest").write_text("final\n")
    told: dict[str, Any] = {
        "topology": {"world_size": 8, "cells": [4, 4], "replica_size": 2, "cell_shape": None},
        "partition": {
            "labels": list("0123456789"),
            "counts": [[draw.randrange(5, 150) for _ in range(10)] for _ in range(2)],
        },
        "origins": {"training.epochs": "command line", "training": "default", "federation": "file config.yaml"},
        "environment": {"xffl": "0.1", "torch": "2.13.0", "python": "3.11", "command": ["xffl", "exec", "config.yaml"]},
    }
    for name, content in told.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "config.yaml").write_text(
        f"experiment: {{name: {folder.name}, seed: {seed}}}\ntraining: {{epochs: 4, batch_size: 8}}\n"
        f"federation: {{every: {every}, algorithm: {algorithm}, delay: {delay}}}\n"
    )
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    pytest.importorskip("matplotlib")
    with open_browser() as page:
        yield page


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """Reports of one run, of two, and of one with a hostile name; with the number of their pictures."""
    folder = tmp_path_factory.mktemp("runs")
    first = write_example(folder / "fedavg")
    second = write_example(folder / "diloco", seed=1, every=40, delay=10, algorithm="diloco")
    hostile = write_example(folder / "<script>alert(1)<" / "script>\"'$x&amp;_^{")
    written = {
        "one": write_report([first]),
        "two": write_report([first, second], folder / "compared"),
        "hostile": write_report([hostile], folder / "hostile"),
    }
    return {name: (report.page, len(report.pictures)) for name, report in written.items()}


@pytest.mark.parametrize("which", ["one", "two", "hostile"])
def test_the_browser_shows_all_and_fetches_nothing(
    which: str, browser: Page, reports: dict[str, tuple[Path, int]]
) -> None:
    file, expected = reports[which]
    browser.resize(1000, 1200)
    browser.open(file)
    pictures = json.loads(browser.evaluate(PICTURES))
    assert len(pictures) == expected >= 10
    assert all(picture["is_whole"] and picture["natural"] > 1e4 and picture["shown"] > 1e4 for picture in pictures)
    assert all(len(picture["alt"]) > 20 for picture in pictures)
    requests = [told["request"]["url"] for told in browser.told("Network.requestWillBeSent")]
    assert [url for url in requests if not url.startswith("data:")] == [file.resolve().as_uri()]
    for complaint in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
        assert browser.told(complaint) == []
    assert browser.told("Network.loadingFailed") == []


def test_what_listens_would_hear(browser: Page, tmp_path: Path) -> None:
    """The oracle of the test above: a page that fetches and complains is found out."""
    (tmp_path / "bad.html").write_text('<img src="none.png"><script>console.error("x"); undefined_function()</script>')
    browser.open(tmp_path / "bad.html")
    assert json.loads(browser.evaluate(PICTURES))[0]["natural"] == 0
    assert any(told["request"]["url"].endswith("none.png") for told in browser.told("Network.requestWillBeSent"))
    assert browser.told("Runtime.consoleAPICalled") and browser.told("Runtime.exceptionThrown")
    assert browser.told("Network.loadingFailed")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_in_light_and_dark(scheme: str, browser: Page, reports: dict[str, tuple[Path, int]]) -> None:
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(reports["one"][0])
    back, ink = (_luminance(colour) for colour in json.loads(browser.evaluate(COLOURS)))
    assert (back > 0.5) == (scheme == "light")
    # WCAG 2: 7 is enough for small text at its strictest level.
    assert (max(back, ink) + 0.05) / (min(back, ink) + 0.05) >= 7
    browser.call("Emulation.setEmulatedMedia", features=[])


def _luminance(colour: list[float]) -> float:
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (c / 255 for c in colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_it_fits_a_small_window_and_paper(browser: Page, reports: dict[str, tuple[Path, int]]) -> None:
    browser.resize(400, 800)
    browser.open(reports["two"][0])
    assert browser.evaluate(WIDEST) <= 0
    printed = base64.b64decode(browser.call("Page.printToPDF", printBackground=False)["data"])
    assert printed.startswith(b"%PDF") and len(printed) > 50_000


TRAIN = """\
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.processes import await_cells
from xffl.training import BaseTrainer, BaseTrainerConfig, EvalMetricConfigMixin, EvalMetricMixin
from xffl.training import FederatedConfigMixin, FederatedMixin, SetupConfigMixin, SetupMixin


@dataclass(kw_only=True)
class Config(BaseTrainerConfig, SetupConfigMixin, EvalMetricConfigMixin, FederatedConfigMixin):
    pass


class Trainer(BaseTrainer, SetupMixin, EvalMetricMixin, FederatedMixin):
    config: Config

    def configure_models(self):
        self.model = nn.Linear(4, 1)

    def configure_optimizers(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def configure_dataloaders(self):
        await_cells(2)
        values = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(values, values.sum(1, keepdim=True))
        return self.train_loader(data), self.validation_loader(data)

    def training_step(self, batch, batch_idx):
        # Cell 0 is still at work when cell 1 is back.
        time.sleep(0.4 if self.last_round is not None and self.last_round.cells == (0,) else 0.02)
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log_scalar("train/loss", loss, weight=len(batch[0]))
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        return {"val_loss": nn.functional.mse_loss(self.model(batch[0]), batch[1])}
"""
CONFIG = """\
trainer: train.Trainer
launch: {processes: 2, federated: [1, 1]}
experiment: {name: demo}
training: {epochs: 50, max_steps: 120, batch_size: 8, log_every: 2, validate_every_rounds: 1, validate_every_epochs:}
federation: {every: 5}
callbacks: [{class_path: CheckpointCallback, init_args: {every_rounds: 2}}]
"""
ROWS = "JSON.stringify([...document.querySelectorAll('tr')].map(row => [...row.children].map(one => one.innerText)))"


@pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")
def test_an_elastic_run_whose_cell_was_killed_is_one_page(
    browser: Page, base_environ: dict[str, str], tmp_path: Path
) -> None:
    """A real run: cell 1 is killed in the exchange of round 4, misses some rounds, and comes back."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "config.yaml").write_text(CONFIG)
    environ = base_environ | {"XFFL_FAULT": "1:0:exchange:4", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "xffl", "exec", "--elastic", "config.yaml"]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0 and "cell 1 ended with exit code 137" in ran.stderr, ran.stderr
    cells = [tmp_path / "runs" / "demo" / f"cell_{cell}" for cell in range(2)]
    lines = [(cell / "rounds" / "cell_0.jsonl").read_text().splitlines() for cell in cells]
    first, second = (list(map(json.loads, of_cell)) for of_cell in lines)
    missed = [one["round"] for one in first if one["cells"] == [0]]
    # The last rounds are cell 1's own: it lacks the steps that it has lost.
    counted = {one["round"]: one["weights"] for one in [*second, *first]}
    assert missed[0] == 4 and len(missed) < 24 and second[-1]["cells"] == [1] and second[-1]["left"] == [0]

    report = write_report(cells)
    browser.resize(1100, 1400)
    browser.open(report.page)
    assert report.page == tmp_path / "runs" / "demo" / "pictures" / "report.html"
    rows = {row[0]: row[1:] for row in reversed(json.loads(browser.evaluate(ROWS)))}
    tries = {one["round"]: one["tries"] for one in [*second, *first]}
    assert tries[4] == 2 and rows["tries of rounds that were repeated"] == [str(sum(tries.values()) - len(tries))]
    assert rows["restarts"] == ["1 (cell 1)"]
    assert rows["epochs, each of rounds by the same cells"] == ["4"]
    assert rows["samples that count in rounds"] == [f"{sum(map(sum, counted.values())):,.0f}"]
    given = [sum(weights[cell] > 0 for weights in counted.values()) for cell in range(2)]
    assert rows[""][:6] == ["contributed", "weight 0", "missed", "last round", "restarts", "steps counted"]
    assert rows["cell 0"][:5] == [str(given[0]), str(len(first) - given[0]), "0", str(first[-1]["round"]), "0"]
    assert rows["cell 1"][0] == str(given[1]) and rows["cell 1"][2] == str(len(missed)) and rows["cell 1"][4] == "1"
    pictures = json.loads(browser.evaluate(PICTURES))
    assert len(pictures) == len(report.pictures) and all(picture["is_whole"] for picture in pictures)
    assert [picture.title for picture in report.pictures][:3] == ["cells", "train/loss", "val/loss"]
    requests = [told["request"]["url"] for told in browser.told("Network.requestWillBeSent")]
    assert [url for url in requests if not url.startswith("data:")] == [report.page.resolve().as_uri()]


def take_screenshot(report: Path, target: Path) -> None:
    """Write what a browser shows first of a report, as a small PNG.

    :param report: A ``report.html``.
    :param target: Such as ``docs/_static/report.png``.
    """
    with open_browser() as page:
        page.resize(1000, 1330)
        page.open(report)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(page.screenshot())


def test_a_screenshot_is_small_enough_for_the_manual(reports: dict[str, tuple[Path, int]], tmp_path: Path) -> None:
    take_screenshot(reports["one"][0], tmp_path / "report.png")
    content = (tmp_path / "report.png").read_bytes()
    assert content.startswith(b"\x89PNG") and 20_000 < len(content) < 150_000


if __name__ == "__main__":
    take_screenshot(Path(sys.argv[1]), Path(sys.argv[2]))
