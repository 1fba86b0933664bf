"""The report of a run: one page of HTML that needs nothing but a browser."""
