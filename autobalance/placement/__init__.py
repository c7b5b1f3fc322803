"""Placement: blocks onto devices, the hooks that move their inputs, and the glue between them."""
