"""Comparisons of activations: which runs they need, starting them, and tables of their results."""
