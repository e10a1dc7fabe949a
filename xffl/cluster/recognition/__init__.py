"""Who started this process: launchers, the variables by which each is recognized, and what they tell of its place."""
