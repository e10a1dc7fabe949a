"""The script of ``trainer.py``: a Trainer of transformers or of TRL with rounds, and a save after every second step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tests.ranks.test_federate import make_model, make_trainer
from tests.ranks.test_federate_trl import make_dpo, make_sft
from xffl.integrations.transformers import federate


class Progress(TrainerCallback):  # type: ignore[misc]
    """Writes how many steps are behind the first rank, for who is to kill it.

    :param path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the step."""
        self._path.write_text(f"{state.global_step}")


def make_plain(folder: str, cell: int, **given: Any) -> Any:
    return make_trainer(folder, make_model(), **given)


KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "DDP": (make_plain, {}),
    "FSDP2": (make_plain, {"is_sharded": True}),
    "SFT": (make_sft, {"packing": True}),
    "LoRA-SFT": (make_sft, {"is_adapted": True, "is_sharded": True}),
    "DPO": (make_dpo, {}),
    "LoRA-DPO": (make_dpo, {"is_adapted": True}),
}
"""What makes the Trainer of each kind, and its options"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    options = parser.parse_args()
    make, given = KINDS[options.kind]
    saves = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    trainer = make(str(options.folder), 0, max_steps=options.steps, **saves, **given)
    rounds = federate(trainer, every=3, algorithm="diloco")
    if rounds.state.is_first_of_job:
        trainer.add_callback(Progress(options.folder / "progress"))
    trainer.train()
    trainer.save_model()
    if rounds.state.is_first_of_job:
        step = 0 if rounds.resumed is None else rounds.resumed.step
        print(f"went on from step {step} by {type(trainer.model_wrapped).__name__}", flush=True)


if __name__ == "__main__":
    main()
