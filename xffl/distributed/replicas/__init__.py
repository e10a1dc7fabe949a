"""Replica groups that may be lost and come back, and how the state of a living one reaches a new one."""
