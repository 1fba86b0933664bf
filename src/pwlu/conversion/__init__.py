"""Convert models: find their activations, watch a model run, and rewrite the places that call them."""
