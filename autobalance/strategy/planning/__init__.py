"""The plan of a run, made for batches of the user's own loaders, and made again where the run outgrows it."""
