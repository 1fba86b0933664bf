"""One run: its folder on disk, its processes, its environment, and its progress."""
