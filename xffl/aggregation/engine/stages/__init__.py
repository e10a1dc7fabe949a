"""What features do to a round, each in a file of its own; a plain round enters none of these files."""
