"""Kernels: leaves of the package, imported by ``ops.py`` alone and only when an operator first needs them."""
