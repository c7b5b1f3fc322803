"""Steps that run out of memory, run again under another plan."""
