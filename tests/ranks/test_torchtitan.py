"""The page's script for torchtitan, run: its trainer and its Llama debug model, in cells of CPU processes.

torchtitan expects GPUs. What it asks of the device, of FlexAttention and of NCCL has stand-ins here; its model, FSDP2,
loaders, loss, clipping, optimizers, schedules and loop are its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from pydoc_data import topics
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 6


def stand_in() -> None:
    """Let torchtitan take CPUs for its devices, and its debug model be small; call it before torchtitan is imported."""
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        set_device=lambda device: None,
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_name=lambda device: "a processor",
        get_device_properties=lambda device: SimpleNamespace(total_memory=2**30),
        memory_stats=lambda device: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        synchronize=lambda: None,
    )
    from torchtitan.distributed import utils as distributed

    distributed.set_pg_timeouts = lambda **given: None  # a barrier over GPUs
    divide = FSDPModule.set_gradient_divide_factor

    def divide_by_sums(module: Any, factor: float) -> None:
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it adds

    FSDPModule.set_gradient_divide_factor = divide_by_sums  # type: ignore[method-assign]
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import config_registry

    debug_model = config_registry.llama3_debugmodel

    def small_debug_model() -> Any:
        config = debug_model()
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        config.loss = CrossEntropyLoss.Config()
        config.hf_assets_path = "tokenizer"
        config.activation_checkpoint = None
        config.validator.enable = False
        config.checkpoint.enable = False
        config.parallelism.spmd_backend = "partial_dtensor"
        config.parallelism.pipeline_parallel_schedule = "1F1B"
        training = config.training
        training.steps = STEPS
        training.seq_len = 32
        training.local_batch_size = 2
        training.global_batch_size = 8  # two batches of each rank are accumulated
        training.mixed_precision_param = "float32"
        training.disable_cuda_graphs = True
        return config

    config_registry.llama3_debugmodel = small_debug_model
    torch.set_num_threads(1)


def write_inputs(folder: Path) -> None:
    """Write a tokenizer of letters, and other texts for each cell."""
    letters = [chr(code) for code in range(32, 127)]
    vocabulary = {"<unk>": 0, **{letter: number for number, letter in enumerate(letters, 1)}}
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    texts = list(topics.topics.values())
    for cell in range(2):
        data = folder / "data" / f"cell_{cell}"
        data.mkdir(parents=True)
        lines = [json.dumps({"text": text[:2000]}) for text in texts[cell::2]]
        (data / "data.json").write_text("\n".join(lines))


def read_script() -> str:
    """Return the script of the page, with rounds after fewer steps."""
    page = (ROOT / "docs/frameworks.rst").read_text()
    shown = re.search(r"\ntorchtitan\n-+\n.*?code-block:: python\n\n((?:   [^\n]*\n|\n)+)", page, re.DOTALL)
    assert shown is not None
    return textwrap.dedent(shown[1]).replace("every=100", "every=2")


def be_rank() -> None:
    """Be a rank of the script, and write down what its model holds in the end."""
    stand_in()
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(read_script(), "titan.py", "exec"), names)
    weights = {name: value.full_tensor() for name, value in names["model"].named_parameters()}
    state = names["state"]
    record = {
        "step": names["trainer"].step,
        "sums": {name: float(value.detach().double().sum()) for name, value in weights.items()},
        "shard": type(next(iter(names["model"].parameters()))).__name__,
        "cell": state.cell,
    }
    Path(f"rank_{state.job_rank}.json").write_text(json.dumps(record))


def test_the_script_of_the_page_trains_cells(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    write_inputs(tmp_path)
    (tmp_path / "titan.py").write_text("from tests.ranks.test_torchtitan import be_rank\nbe_rank()\n")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "xffl", "exec", "--isolate", "--processes", "4", "--federated", "2,2", "titan.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    records = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(4)]
    assert [record["cell"] for record in records] == [0, 0, 1, 1]
    assert [record["step"] for record in records] == [STEPS] * 4
    assert all(record["sums"] == records[0]["sums"] for record in records)
    assert records[0]["shard"] == "DTensor"
