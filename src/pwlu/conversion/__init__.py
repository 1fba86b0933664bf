"""Convert models: find their activations, replace them, fuse batch norms with PWLUs, and save what was done."""
