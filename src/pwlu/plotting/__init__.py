"""Figures with matplotlib, drawn from the numbers of ``pwlu.analysis.alignment`` and from tables of results."""
