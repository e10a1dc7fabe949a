"""Noise that hides a cell's share, and sums that hide it from the other cells."""
