"""Jobs: what one command starts. Options are read once into a request, and a table says what carries it out.

``options`` are what one types; ``resolve`` makes a ``request`` of them: whether this process is ``started`` as a
rank, the ``asked_cells``, the ``place`` where ranks start, and what they run, which is one of the ``programs``;
of these ``starts`` makes the requests to start ranks, or cells that start theirs. ``dispatch`` has the table:
``ranks`` starts ranks, or is one; ``cells`` keeps the cells of an elastic run alive, which find each other by a
``lighthouse``.
"""
