"""The training loop, what it trains, and the summary it writes."""
