"""What stages do to fit where they hold too much: recompute, offload, stream weights, step on the host."""
