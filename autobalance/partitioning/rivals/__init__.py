"""What a user would take instead: even splits, and data parallelism by formula."""
