"""Whether ranks compute alike and hold the same, and what is said where they do not."""
