"""Steps in micro-batches, between Lightning's own calls."""
