"""Workarounds of other projects: what xffl needs of them, and they do not offer to the public.

A file for each project. Each function says which version needs it, with a link to where it is written or asked for; a
test in ``tests/unit/test_compat.py`` fails when it is not needed any more. Nothing here imports the rest of xffl.
"""
