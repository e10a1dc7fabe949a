"""Values of which ranks hold parts: who reduces gradients, norms, bytes, means, and others in their place."""
