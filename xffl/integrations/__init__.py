"""Training loops of others, in which rounds are made: a framework's own trainer stays as it is."""
