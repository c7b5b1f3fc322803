from __future__ import annotations

from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import HOST, ROOT, Timeline
from autobalance.timelines.host_storages import tells_optimizer, with_host

# Block 0: weights, a workspace, an activation, a gradient, state, a temporary of the step; block 1: weights, state.
OWNERS = (0, 0, 0, 0, 0, 0, 1, 1, ROOT)
STEP = Timeline(
    sizes=(8, 64, 4, 8, 16, 2, 8, 16, 1),
    owners=OWNERS,
    values=(-1,) * 9,
    events=(1, 7, 9, 2, 3, 4, -3, 5, 8, 6, -6, -4),
    marks=(("step 1 forward", 3), ("step 1 backward", 5), ("step 1 optimizer", 7), ("step 1 end", 11)),
    scratch=(1,),
)


def test_what_is_born_in_the_optimizer_s_step_goes_with_the_optimizer() -> None:
    assert with_host(STEP, optimizer=[0]).owners == (0, 0, 0, 0, HOST, HOST, 1, 1, ROOT)
    assert with_host(STEP, optimizer=[0, 1]).owners == (0, 0, 0, 0, HOST, HOST, 1, HOST, ROOT)


def test_weights_take_their_gradients_and_state_along_and_leave_activations_and_workspaces() -> None:
    assert with_host(STEP, weights=[0]).owners == (HOST, 0, 0, HOST, HOST, HOST, 1, 1, ROOT)
    assert with_host(STEP, weights=[1]).owners == (0, 0, 0, 0, 0, 0, HOST, HOST, ROOT)


def test_peaks_are_those_of_what_is_left() -> None:
    homes = with_host(STEP, optimizer=[0, 1]).homes([0, 0], root=0)
    # Both weights, the batch, the workspace, the activation and its gradient.
    assert STEP.peaks(homes, devices=1) == [8 + 8 + 1 + 64 + 4 + 8]


def test_only_traces_tell_the_optimizer_s_storages() -> None:
    assert tells_optimizer(STEP)
    assert not tells_optimizer(Profile.from_costs([4, 4]).timeline)
