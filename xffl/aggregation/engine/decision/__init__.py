"""What all ranks decide about a round: whether it takes place and counts, and what they do where they cannot know."""
