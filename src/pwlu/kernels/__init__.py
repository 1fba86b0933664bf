"""Kernels: leaves of the package, imported by ``implementations.py`` alone and only when an operator first needs them."""
