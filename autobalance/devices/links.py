"""How fast bytes go from one device to another, and to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autobalance.devices.device import Device

LATENCY = 5e-6
"""Seconds before the first byte of a copy arrives: 4 to 6 microseconds over PCI Express 5.0 as the benchmark `p2pmark`
(https://github.com/lukealonso/p2pmark) publishes them."""


def link_between(a: Device, b: Device) -> float:
    """Bytes per second from one device to another, one way: what the slower of the two can do.

    Inside a node a measured link of the pair counts first, then the links of both. Without peer access a tensor goes
    through pinned memory of the host, where the second copy begins when the first has ended. Between nodes it goes over
    the network.

    Example:
        >>> link_between(Device("a", 1, link=10.0), Device("b", 1, link=5.0))
        5.0

    Args:
        a, b: two different devices.
    """
    if a.node != b.node:
        return min(a.network, b.network)
    measured = [dict(one.links)[other.name] for one, other in ((a, b), (b, a)) if other.name in dict(one.links)]
    if measured:
        return min(measured)
    if a.has_peers and b.has_peers:
        return min(a.link, b.link)
    return host_path(a, b)


def host_path(a: Device, b: Device) -> float:
    """Bytes per second from one device to another through pinned memory of the host, one copy after the other.

    Example:
        >>> host_path(Device("a", 1, host_link=10.0), Device("b", 1, host_link=10.0))
        5.0

    Args:
        a, b: devices.
    """
    return a.host_link * b.host_link / (a.host_link + b.host_link)


def link_matrix(devices: Sequence[Device]) -> NDArray[np.float64]:
    """Bytes per second between every two devices; infinite from a device to itself, where nothing moves.

    Example:
        >>> link_matrix(parse_devices("2 nodes x 8xH100"))[0, 8]
        50000000000.0

    Args:
        devices: K of them.

    Returns:
        A matrix of K rows and columns.
    """
    rates = np.full((len(devices), len(devices)), np.inf)
    known: dict[object, float] = {}
    named = any(device.links for device in devices)
    kinds = [(device.speed, device.name if named else "") for device in devices]
    of = [list(dict.fromkeys(kinds)).index(kind) for kind in kinds]
    for i, a in enumerate(devices):
        for j, b in enumerate(devices):
            if i != j:
                pair = (of[i], of[j])
                if pair not in known:
                    known[pair] = link_between(a, b)
                rates[i, j] = known[pair]
    return rates
