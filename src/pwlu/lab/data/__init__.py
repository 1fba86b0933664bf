"""Data sets: image files and annotations as tensors, with reproducible random augmentation."""
