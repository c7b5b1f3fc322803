from __future__ import annotations

import pytest

from autobalance.devices.device import Device
from autobalance.devices.links import host_path, link_between, link_matrix
from autobalance.devices.words import parse_devices


def test_the_slower_link_decides_inside_a_node_and_the_slower_network_between_nodes() -> None:
    here, there = Device("a", 1, link=10.0, network=3.0), Device("b", 1, link=5.0, network=2.0)
    far = Device("c", 1, link=10.0, node=1, network=4.0)
    assert link_between(here, there) == link_between(there, here) == 5.0
    assert (link_between(here, far), link_between(far, there)) == (3.0, 2.0)


def test_a_measured_link_of_the_pair_comes_first_and_its_slower_way_counts() -> None:
    a = Device("a", 1, link=10.0, links=(("b", 90.0),))
    b = Device("b", 1, link=10.0, links=(("a", 80.0),))
    assert (link_between(a, b), link_between(a, Device("c", 1, link=10.0))) == (80.0, 10.0)


def test_without_peer_access_both_host_links_are_passed_one_after_the_other() -> None:
    a, b = Device("a", 1, host_link=30.0, has_peers=False), Device("b", 1, host_link=60.0)
    assert host_path(a, b) == pytest.approx(20.0)  # 1 / 30 + 1 / 60 seconds for a byte
    assert link_between(a, b) == link_between(b, a) == pytest.approx(20.0)


def test_the_matrix_has_every_pair() -> None:
    rates = link_matrix(parse_devices("2 nodes x 2xH100"))  # NVLink 450 GB/s, network 400 Gbit/s
    near, far, same = 450e9, 50e9, float("inf")
    assert rates.tolist() == [
        [same, near, far, far],
        [near, same, far, far],
        [far, far, same, near],
        [far, far, near, same],
    ]
