"""What storage events become: where blocks share devices, for a batch of another size, for a deeper model. No torch."""
