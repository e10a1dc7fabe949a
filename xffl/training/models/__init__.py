"""Hugging Face causal language models and LoRA adapters, on cells of any kind.

:mod:`xffl.training.models.building` builds models, with values or on the meta device; ``reading`` fills a sharded model
from safetensors files, each rank its part; ``writing`` makes such files again; ``lora`` adds adapters; ``tensors`` says
what files call a model's tensors and which elements a rank holds. The packages behind them (extras ``hf`` and ``lora``)
are imported where a function needs them.
"""

from __future__ import annotations

from xffl.training.models.building import ModuleInitializer, causal_lm, causal_lm_loss, count_targets, layer_classes
from xffl.training.models.lora import adapter_state, add_lora, save_adapters
from xffl.training.models.weights import agree_on_base, load_weights, save_pretrained

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
