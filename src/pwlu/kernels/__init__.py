"""Compiled kernels for CPU and CUDA, and ``dispatch``, which chooses between them and the reference implementation.

The kernels never import the reference implementation. ``dispatch`` imports them when an operator first needs one.
"""
