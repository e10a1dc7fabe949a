"""What a training loop needs around its steps: which samples each cell owns and each rank takes.

:mod:`xffl.training.partition` deals a dataset out to the cells, as index arrays over any dataset, without torch;
:mod:`xffl.training.sampler` turns a cell's part into the batches of each of its ranks, epoch by epoch, and can resume
between any two batches.
"""
