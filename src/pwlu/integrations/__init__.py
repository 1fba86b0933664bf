"""Integrations with training frameworks and quantizers: one file per framework, imported only by its users.

Lightning and Accelerate work with :class:`pwlu.TwoPhase` directly; docs/training.md shows how.
"""
