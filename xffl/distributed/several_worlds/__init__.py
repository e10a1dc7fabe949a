"""Cells that are worlds of their own: what a state knows of the others, and groups and notes that reach them."""
