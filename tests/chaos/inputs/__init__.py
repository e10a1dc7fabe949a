"""Damaged and hostile inputs for everything that reads what others wrote: ``python -m tests.chaos.inputs``."""
