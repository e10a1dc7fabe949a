"""Rounds as a training loop sees them: what it offers, what became of it, and the three ways in which rounds are made.

:mod:`~xffl.aggregation.rounds.network` joins the cells of one job, :mod:`~xffl.aggregation.rounds.elastic` cells that
come and go, each a job of its own, and :mod:`~xffl.aggregation.rounds.files` jobs that no network joins.
:func:`~xffl.aggregation.rounds.choose.choose_rounds` picks one of them from the state.
"""
