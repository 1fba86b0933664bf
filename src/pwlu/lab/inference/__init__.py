"""Finished networks: loaded from a run, exported, and timed."""
