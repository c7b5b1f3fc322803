"""Whether parts of a batch give what the batch gives."""
