"""From one trial step to a profile: what every block costs, and the storage events behind it."""
