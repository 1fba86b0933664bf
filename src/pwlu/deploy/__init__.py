"""Prepare trained models for inference: fuse, simplify, tabulate for int8, export to ONNX."""
