"""Data sets: files and images as tensors, with reproducible random augmentation."""
