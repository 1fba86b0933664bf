"""Numbers about a trained model: where the inputs of its PWLUs lie, and what functions they have learned. Draws nothing."""
