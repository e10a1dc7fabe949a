"""The layout of ``--help``."""

from __future__ import annotations

import argparse

from jsonargparse import DefaultHelpFormatter

__all__ = ["HelpFormatter"]


class HelpFormatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Show types and defaults, as jsonargparse does, and leave the lines of descriptions and examples as they are."""
