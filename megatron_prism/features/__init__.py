"""Features: a folder each, found by ``core.feature``; core works without any of them.

A feature's folder has its command, its flags, its analysis, its renderer and its scripts of pages.
Its tests stand in ``tests/features/<name>/``, its page in ``docs/how-to/``.  ``FEATURE`` in the
folder's package says which modules core imports, and which one other feature it uses.
The tests of features delete each feature from a copy of the tree and runs what is left.
"""
