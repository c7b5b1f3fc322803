"""Devices as plain data: what they hold, how fast they are, how they are named in words, and which this machine has."""
