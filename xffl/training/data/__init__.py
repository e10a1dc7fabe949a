"""Data of a run: a dataset is dealt out to the cells, sampled, batched and streamed to the ranks."""
