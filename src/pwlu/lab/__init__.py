"""Experiments as the paper makes them, from recipe to result: what ``pwlu train``, ``compare`` and ``bench`` run."""
