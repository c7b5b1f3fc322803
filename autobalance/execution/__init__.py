"""Execution: how a batch goes through the stages."""
