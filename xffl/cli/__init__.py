"""What one types: commands that parse and call. Torch is imported only inside a command."""
