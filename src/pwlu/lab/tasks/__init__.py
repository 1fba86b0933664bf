"""Tasks: classification and detection, each with batches, a loss and a measurement."""
