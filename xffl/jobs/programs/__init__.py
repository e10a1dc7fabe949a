"""What the ranks of a job run: a ``script``, or the training that is ``configured``; and the files they start by."""
