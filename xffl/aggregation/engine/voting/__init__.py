"""What ranks say in a vote, and how all of them learn it: as a table, or once for all that say the same."""
