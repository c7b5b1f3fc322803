"""Profiles and plans as tables for people."""

import random

# rich draws random numbers where it is imported, which must not change those that the user's training draws.
_state = random.getstate()
import rich.console  # noqa: E402, F401

random.setstate(_state)
