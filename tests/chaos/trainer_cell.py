"""The script of ``trainer.py``: a Trainer of transformers with rounds, and a save after every second step."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tests.ranks.test_federate import make_model, make_trainer
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--sharded", action="store_true", help="FSDP2 in place of DDP")
    options = parser.parse_args()
    trainer = make_trainer(
        str(options.folder),
        make_model(),
        is_sharded=options.sharded,
        max_steps=options.steps,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
    )
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
