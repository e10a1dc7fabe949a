"""The packages of the extras ``hf`` and ``lora``, imported where they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from xffl.extras import optional_import

__all__ = ["package"]

EXTRAS = {"transformers": "hf", "huggingface_hub": "hf", "safetensors": "hf", "peft": "lora"}


def package(name: str) -> Any:
    """Import a package of an extra; local.

    :param name: The package or a module of it.
    :return: The module.
    :raises ConfigError: if the package cannot be imported.
    """
    top = name.partition(".")[0]
    with optional_import(EXTRAS[top], f"Hugging Face models need {top}"):
        return importlib.import_module(name)
