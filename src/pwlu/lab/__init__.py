"""Reproducible experiments, from recipe to result: the code behind ``pwlu train``, ``compare`` and ``bench``."""
