"""Splits that look at one thing only: how tools and people divide a model when they know nothing else of it."""

from __future__ import annotations

from autobalance.profiling.profile import Profile


def even_by_layers(profile: Profile, devices: int) -> list[int]:
    """As many blocks on each device as on any other, the first devices one more where it does not come out even.

    Example:
        >>> even_by_layers(Profile.from_costs(static=[1, 1, 1, 1, 1]), 2)
        [0, 0, 0, 1, 1]

    Args:
        profile: what the blocks cost, of which only their number counts.
        devices: how many there are.

    Returns:
        Device index per block, in call order.
    """
    each, more = divmod(len(profile.blocks), devices)
    return [device for device in range(devices) for _ in range(each + (device < more))]


def even_by_weights(profile: Profile, devices: int) -> list[int]:
    """Blocks in call order cut into parts of about equal weights: each block goes where its middle lies.

    Example:
        >>> even_by_weights(Profile.from_costs(static=[1, 1, 1, 1, 4, 4]), 3)
        [0, 0, 0, 0, 1, 2]

    Args:
        profile: what the blocks cost, of which only their weights count.
        devices: how many there are.

    Returns:
        Device index per block, in call order.
    """
    total = sum(block.weights for block in profile.blocks) or 1
    assignment = []
    before = 0
    for block in profile.blocks:
        middle = before + block.weights / 2
        assignment.append(min(int(middle * devices / total), devices - 1))
        before += block.weights
    return assignment
