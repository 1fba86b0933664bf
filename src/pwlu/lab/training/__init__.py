"""The training loop, the trainer that takes its steps, and the summary of a run."""
