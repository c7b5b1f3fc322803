"""DDP, FSDP and ZeRO-3 by formula, against hand calculation on a model of two equal blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autobalance.devices.device import Device
from autobalance.devices.words import parse_devices
from autobalance.partitioning.rivals.alternatives import alternatives_of, ring_bandwidth
from autobalance.profiling.block_cost import BlockCost
from autobalance.profiling.profile import Profile


def told(rows: tuple[BlockCost, ...]) -> tuple[BlockCost, ...]:
    """Rows whose 16 static bytes are 4 of weights, 4 of gradients and 8 of optimizer state."""
    return tuple(replace(row, weights=4, gradients=4, optimizer=8, optimizer_time=1.0) for row in rows)


BY_HAND = Profile.from_costs(
    static=[16, 16],
    saved=[8, 8],
    transient=[8, 8],
    forward_time=[1, 1],
    backward_time=[2, 2],
    batch_size=8,
)
PROFILE = replace(BY_HAND, blocks=told(BY_HAND.blocks), other_blocks=told(BY_HAND.other_blocks))
DEVICES = [Device("a", 1, link=4.0, host_link=1.0, bandwidth=1e12)] * 2


def test_ddp_holds_the_whole_model_and_sums_gradients_beside_the_backward() -> None:
    ddp, _, _ = alternatives_of(PROFILE, DEVICES, [44, 50])
    # 4 samples each: 32 static, 4 saved by each block, 4 in the first backward.
    assert (ddp.peak, ddp.budget, ddp.fits, ddp.parts) == (44, 44, True, 1)
    assert ddp.moved == 8  # 2 passes of half of 8 bytes
    assert ddp.step_time == 1 + 2  # 8 bytes / 4 pass within the backward
    assert ddp.optimizer_time == 2
    (slow, _, _) = alternatives_of(PROFILE, [replace(DEVICES[0], link=1.0)] * 2, [44, 44])
    assert slow.step_time == 1 + 8


def test_fsdp_shares_what_stays_and_gathers_two_blocks() -> None:
    _, fsdp, _ = alternatives_of(PROFILE, DEVICES, [44, 44])
    # Half of 32; two blocks of 4 and 4 of gradients; 8 saved and 4 in passing.
    assert (fsdp.peak, fsdp.fits, fsdp.host) == (16 + 12 + 12, True, 0)
    assert fsdp.moved == 12  # 3 passes of half of 8 bytes
    # The first gather, 2 bytes / 4; forwards of 0.5 hide one; backwards of 1 hide a gather and a scatter.
    assert fsdp.step_time == 0.5 + 1 + 2
    assert fsdp.optimizer_time == 1


def test_zero_with_offload_keeps_what_stays_on_the_host_and_pays_with_its_link() -> None:
    _, _, zero = alternatives_of(PROFILE, DEVICES, [44, 44])
    assert (zero.peak, zero.host) == (12 + 12, 32)
    assert zero.moved == 12 + 3 * 4  # a device's half of weights, twice, and of gradients
    # 2 bytes / 1 for each block's half: the first fetch, then 2 for each forward, 4 for each backward.
    assert zero.step_time == 2 + 2 * 2 + 2 * 4
    assert zero.optimizer_time == pytest.approx(2 * 1e12 / 204.8e9)  # the host's memory is nearly 5 times slower


def test_a_share_that_does_not_fit_is_run_in_parts_that_do() -> None:
    ddp, _, _ = alternatives_of(PROFILE, DEVICES, [39, 39])
    # 2 samples at a time: 32 static, 2 saved by each block, 2 in the first backward.
    assert (ddp.peak, ddp.parts, ddp.fits) == (38, 2, True)
    assert ddp.step_time == (0.5 + 1) + 0.5 + 2  # gradients are summed once, beside the last backward of 1
    (ddp, _, _) = alternatives_of(PROFILE, DEVICES, [33, 33])
    assert (ddp.parts, ddp.fits) == (4, False)


def test_mixed_precision_sends_half_of_float32() -> None:
    _, fsdp, _ = alternatives_of(replace(PROFILE, precision="bf16-mixed"), DEVICES, [44, 44])
    assert (fsdp.moved, fsdp.peak) == (6, 16 + 6 + 12)


def test_without_training_weights_are_gathered_once_and_ddp_sends_nothing() -> None:
    ddp, fsdp, zero = alternatives_of(replace(PROFILE, training=False), DEVICES, [44, 44])
    assert (ddp.moved, fsdp.moved, zero.moved) == (0, 4, 8)


def test_the_slowest_device_decides() -> None:
    devices = [replace(DEVICES[0], flops=2.0), replace(DEVICES[0], flops=1.0)]
    ddp, _, _ = alternatives_of(PROFILE, devices, [44, 44])
    assert ddp.step_time == 2 * (1 + 2)


def test_a_ring_is_as_fast_as_its_slowest_link_and_uses_all_adapters_between_nodes() -> None:
    assert ring_bandwidth(parse_devices("1xH100")) == float("inf")
    assert ring_bandwidth(parse_devices("8xH100")) == 450e9  # NVLink
    assert ring_bandwidth(parse_devices("2 nodes x 2xH100")) == 2 * 50e9  # two adapters of 400 Gbit/s


def test_a_profile_by_hand_says_what_it_does_not_tell() -> None:
    ddp, _, _ = alternatives_of(BY_HAND, DEVICES, [44, 44])
    assert ddp.moved == 32
    assert any("does not tell gradients apart" in note for note in ddp.notes)


def test_a_batch_that_cannot_be_shared_out_is_an_error_in_words() -> None:
    with pytest.raises(ValueError, match="does not say how bytes depend on the number of samples"):
        alternatives_of(Profile.from_costs([1]), DEVICES, [1, 1])
