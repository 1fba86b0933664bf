"""Trained models for inference: fused, simplified, as int8 tables, or exported to ONNX."""
