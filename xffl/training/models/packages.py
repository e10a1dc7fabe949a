"""The packages of the extras ``hf`` and ``lora``, imported where they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from xffl.errors import ConfigError

__all__ = ["package"]

EXTRAS = {"transformers": "hf", "huggingface_hub": "hf", "safetensors": "hf", "peft": "lora"}


def package(name: str) -> Any:
    """Import a package of an extra; local.

    :param name: The package or a module of it.
    :return: The module.
    :raises ConfigError: if the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        top = name.partition(".")[0]
        if missing.name is None or missing.name.partition(".")[0] != top:
            raise
        raise ConfigError(
            f"Hugging Face models need {top}, which is not installed; install it with pip install 'xffl[{EXTRAS[top]}]'"
        ) from missing
