"""Code that all other folders use: argument checks, atomic writes, reports, and text for messages and tables."""
