"""Rounds across facilities that no network joins, as CWL documents which StreamFlow or cwltool runs. Without torch."""
