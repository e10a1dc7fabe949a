"""A simulator of large worlds: xffl's own code plays chosen ranks one after the other, and all that they do is counted.

:mod:`tests.scale.play` plays start-up, plan and rounds of a rank, :mod:`tests.scale.recorded` has the store and the
links that it plays over, and ``python -m tests.scale`` prints the table of the counts for growing worlds.
"""
