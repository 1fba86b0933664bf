"""What ``pwlu.convert_`` is made of: recognising activations, watching a model run, rewriting the places that call them."""
