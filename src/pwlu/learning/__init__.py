"""The learning method of the paper (two phases with a realignment between them), and other tools for training PWLUs."""
