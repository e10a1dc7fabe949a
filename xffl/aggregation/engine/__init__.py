"""One round between cells: what moves, the plan of its buckets, the exchange, and what all ranks decide about it."""
