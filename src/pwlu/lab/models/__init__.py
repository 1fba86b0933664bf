"""Network architectures for classification and detection."""
