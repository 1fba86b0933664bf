"""Recipes as data: their settings, their names, and the metrics that they report."""
