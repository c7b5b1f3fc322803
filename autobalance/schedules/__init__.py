"""In which order micro-batches go through stages, and when each device does what. No torch."""
