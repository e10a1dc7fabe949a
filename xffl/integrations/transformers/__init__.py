"""Rounds in a Trainer of Hugging Face's transformers, and in what derives from it, as TRL's trainers do."""

from __future__ import annotations

from xffl.integrations.transformers.wrapping import federate

__all__ = ["federate"]
