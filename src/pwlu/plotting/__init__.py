"""Figures with matplotlib, drawn from the numbers of ``pwlu.analysis`` and from tables of results."""
