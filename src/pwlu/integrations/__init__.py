"""What training frameworks need beyond :class:`pwlu.TwoPhase`: one file a framework, imported only when asked for.

Lightning and Accelerate need nothing; docs/training.md shows where the two lines go.
"""
