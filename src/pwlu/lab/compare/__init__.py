"""Comparisons of activations: the runs that they need, starting them, and tables of their results."""
