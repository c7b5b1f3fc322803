"""What a run reaches beside what was predicted."""
