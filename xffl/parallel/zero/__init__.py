"""ZeRO inside a cell: DeepSpeed, the mark of a model that it has cut, and how rounds and checkpoints see it."""
