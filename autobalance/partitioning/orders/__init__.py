"""Ways to split a model other than one visit of a chain to each device."""
