"""What a Trainer may be asked to do that does not go together with rounds."""

from __future__ import annotations

from typing import Any

from xffl.errors import ConfigError

__all__ = ["check_arguments", "check_loader"]

_REASONS = {
    "load_best_model_at_end": (
        "it replaces a cell's model by its own best checkpoint before the last round; leave it out, and choose among "
        "the checkpoints afterwards"
    ),
    "auto_find_batch_size": (
        "it begins the training of one cell again while the others wait for it in a round; leave it out, and give "
        "per_device_train_batch_size"
    ),
    "push_to_hub": (
        "each cell would push to one repository; leave it out, and push the model of cell 0 when the training is over"
    ),
    "sync_ref_model": (
        "between two rounds each cell would sync its reference model with a model of its own, and checkpoints of TRL "
        "have none; leave it out"
    ),
}


def check_arguments(trainer: Any) -> None:
    """Refuse TrainingArguments under which cells would not train one model; local.

    :param trainer: The Trainer.
    :raises ConfigError: if there is such an argument; the text has its name and the reason.
    """
    args = trainer.args
    for name, reason in _REASONS.items():
        if getattr(args, name, False):  # some are those of TRL's trainers only
            raise ConfigError(f"a federated Trainer does not know {name}=True: {reason}")
    if args.save_strategy == "best":
        raise ConfigError(
            "a federated Trainer does not know save_strategy='best': the cells would save at unlike steps, and none "
            "of their checkpoints might go together; give 'steps' or 'epoch'"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"this process trains on {args.n_gpu} GPUs with DataParallel; start one process for each GPU, as xffl exec "
            "does"
        )


def check_loader(trainer: Any) -> None:
    """Refuse a Trainer whose loader is made of other data than ``train_dataset``, which is dealt out; local.

    :param trainer: The Trainer.
    :raises ConfigError: if its ``get_train_dataloader`` neither reads that attribute nor calls the one it overrides.
    """
    code = getattr(trainer.get_train_dataloader, "__code__", None)
    if code is not None and {"train_dataset", "get_train_dataloader"}.isdisjoint(code.co_names):
        raise ConfigError(
            f"data='split' deals out train_dataset, which get_train_dataloader of {type(trainer).__name__} does not "
            "read; read self.train_dataset there, or give data='own' and each cell its part (xffl.adopt().cell is its "
            "number)"
        )
