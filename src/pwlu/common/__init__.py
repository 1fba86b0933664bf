"""Code that all other folders use: argument checks, atomic writes, and text for messages and tables."""
