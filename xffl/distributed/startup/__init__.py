"""What start-up is made of: the store where ranks meet, what they claim of their places, and what they agree on."""
