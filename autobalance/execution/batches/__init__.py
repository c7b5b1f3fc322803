"""Batches in parts, and what their steps give merged."""
