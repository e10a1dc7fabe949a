"""Rounds of cells that are worlds of their own: their scope, their groups, and what a new group compares."""
