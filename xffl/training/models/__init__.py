"""Hugging Face causal language models and LoRA adapters, on cells of any kind.

:mod:`xffl.training.models.building` builds them, with values or on the meta device; ``reading`` fills a model that is
spread from safetensors files, each rank its part; ``writing`` makes such files again; ``lora`` adds adapters. The
packages behind them (extras ``hf`` and ``lora``) are imported where a function needs them.
"""

from __future__ import annotations

from xffl.training.models.base import agree_on_base
from xffl.training.models.building import causal_lm, layer_classes
from xffl.training.models.initialization import ModuleInitializer
from xffl.training.models.lora import adapter_state, add_lora, save_adapters
from xffl.training.models.losses import causal_lm_loss, count_targets
from xffl.training.models.reading import load_weights
from xffl.training.models.writing import save_pretrained

__all__ = [
    "ModuleInitializer",
    "adapter_state",
    "add_lora",
    "agree_on_base",
    "causal_lm",
    "causal_lm_loss",
    "count_targets",
    "layer_classes",
    "load_weights",
    "save_adapters",
    "save_pretrained",
]
