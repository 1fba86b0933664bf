"""The modules: PWLU, DynamicPWLU, NonUniformPWLU, and the state and constraints that belong to them."""
