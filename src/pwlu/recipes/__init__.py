"""Training as the paper does it: settings as rows of data, data sets, networks, the loop, and tables of what came out."""
