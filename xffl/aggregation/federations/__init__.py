"""Rounds of cells that are no fixed set in one job: that come and go, and that average in levels."""
