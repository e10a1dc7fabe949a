"""What is exchanged: the model's tensors, who holds them, and the groups and buckets in which they cross."""
