"""The script of the page about strategies runs as it stands there, whatever the configuration says."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.decoder import Block, Decoder, loss_of, text_batch
from tests.worlds import run_world

PAGE = Path(__file__).resolve().parents[2] / "docs" / "strategies.rst"


def shown(start: str) -> str:
    """Return the page's block of code that begins so."""
    blocks = re.findall(r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", PAGE.read_text(), re.MULTILINE)
    return next(block for block in map(textwrap.dedent, blocks) if block.startswith(start))


def run_script(rank: int, world_size: int, names: tuple[str, ...]) -> list[float]:
    """Run the script with each strategy, and return how far the weights are from a loop by hand."""
    found = []
    for name in names:
        config = {"distributed": {"strategy": name, "wrap": (Block,)}, "training": {"gradient_accumulation": 2}}
        if name == "hsdp":
            config["distributed"]["device_parameters"] = {"dp_shard": 1, "dp_replicate": "auto"}
        torch.manual_seed(0)
        batches = [text_batch(step) for step in range(4)]
        kept: dict[str, Any] = {"config": config, "build_model": Decoder, "loss_of": loss_of, "loader": batches}
        exec(shown("import torch, xffl"), kept)
        torch.manual_seed(0)
        model = Decoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        for window in (batches[:2], batches[2:]):
            for tokens, targets in window:
                (loss_of(model(tokens), targets) / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(kept["model"].parameters(), model.parameters(), strict=True)
        found.append(max((one - other).abs().max().item() for one, other in pairs))
    return found


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "hsdp"])
def test_the_shown_script_trains(name: str) -> None:
    assert run_world(1, run_script, (name,), init=False)[0][0] < 1e-6


def test_the_shown_configuration_can_be_read() -> None:
    from xffl.parallel import read_config

    kept: dict[str, Any] = {"Block": Block}
    exec(shown("from xffl.distributed"), kept)
    found = read_config(kept["config"])
    assert found.distributed.strategy == found.distributed.device_parameters.strategy == "hsdp"
    assert found.distributed.federated == (8, 8) and found.training.gradient_accumulation == 2
