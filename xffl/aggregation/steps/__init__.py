"""Local steps of a training loop: what they count for in a round, and what features do at them."""
