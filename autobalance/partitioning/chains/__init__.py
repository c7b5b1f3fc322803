"""What stages of a chain cost on devices, and the exact search for the best way to cut it."""
