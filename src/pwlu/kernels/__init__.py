"""Compiled code for CPU and CUDA, and ``dispatch``, which chooses between it and the reference for every device.

The kernels themselves never import the reference; ``dispatch`` imports them when an operator first needs one.
"""
