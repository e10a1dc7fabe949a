"""How ranks find out that they were given the same, and raise the same error where they were not."""
