"""Measure trained models: where the inputs of their PWLUs lie, and which functions they learned. Numbers, no figures."""
