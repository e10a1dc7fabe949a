"""The journal of an elastic run: numbered records that decide which rounds count.

Which round was taken is one fact, and it is kept in one place. The journal has one record for each number, written once
and never changed. A cell that wants to make a round tries the next number; the round is taken if and only if its record
stands there.

:mod:`~xffl.journal.records` has the records and their text; :mod:`~xffl.journal.who_continues` decides from them which
cells may continue, and from which model; :mod:`~xffl.journal.folder` keeps them in a folder that the cells share,
:mod:`~xffl.journal.service` behind a small service; :mod:`~xffl.journal.place` says which of the two a run has;
:mod:`~xffl.journal.cell` is what a cell makes of them.
"""
