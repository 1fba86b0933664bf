"""Draw figures with matplotlib from measured numbers and from tables of results."""
