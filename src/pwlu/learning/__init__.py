"""The learning method of the paper: two phases, realignment, and what else changes how PWLUs are trained."""
