from __future__ import annotations

import numpy as np

from autobalance.partitioning.chains.chain import Chain
from autobalance.partitioning.savings.choice import Choice
from autobalance.partitioning.savings.saver import Saver, unit_costs
from autobalance.partitioning.savings.savings import SavingCosts, saving_costs
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import ROOT

# All blocks on one device: 30 bytes that stay, and 20 that each saves. Blocks that run again keep none of these.
PROFILE = Profile.from_costs([10] * 3, saved=[20] * 3)
CHAIN = Chain(((0,), (1,), (2, ROOT)), (), {})
WHOLE = (1, 0, 3)


def _costs() -> SavingCosts:
    return unit_costs(saving_costs(PROFILE.blocks, [1.0, 2.0, 4.0], timeline=PROFILE.timeline), CHAIN)


def _saving(saver: Saver) -> tuple[str, ...] | None:
    choice = saver.choices[WHOLE]
    return None if choice is None else choice.saving


def test_units_take_what_their_blocks_take() -> None:
    profile = Profile.from_costs([1, 2, 4], saved=[10, 20, 40], transient=[7, 5, 3])
    units = unit_costs(saving_costs(profile.blocks, [1.0, 2.0, 4.0]), Chain(((0, 1), (2, ROOT)), (), {}))
    assert units.static.tolist() == [3, 4]
    assert units.saved.tolist() == [30, 40]
    assert units.forward_transient.tolist() == [7, 3]
    assert units.forward_time.tolist() == [3.0, 4.0]
    assert units.recomputable.tolist() == [True, True]


def test_a_stage_is_chosen_once_and_again_when_it_held_more() -> None:
    saver = Saver(_costs(), capacity=70, host_link=1.0)
    # Of the two first blocks 20 bytes may rest while the last one runs.
    assert saver.choose(WHOLE, 21.0, 90, 90) is True
    assert _saving(saver) == ("recompute", "keep", "keep")
    assert saver.choose(WHOLE, 21.0, 90, 90) is False
    saver.learn(WHOLE, 1)
    assert saver.choose(WHOLE, 21.0, 90, 90) is True
    assert _saving(saver) == ("recompute", "recompute", "keep")
    saver.learn(WHOLE, 20)
    assert saver.choose(WHOLE, 21.0, 90, 90) is True
    assert _saving(saver) is None, "one byte and twenty more: not even the block that runs has room"


def test_what_a_trace_holds_beyond_the_rows_stays_whatever_blocks_do() -> None:
    saver = Saver(_costs(), capacity=70, host_link=1.0)
    saver.choose(WHOLE, 21.0, 90 + 1, 90 + 1)
    assert _saving(saver) == ("recompute", "recompute", "keep")


def test_a_choice_takes_the_forwards_once_more_or_waits_for_the_host() -> None:
    saver = Saver(_costs(), capacity=70, host_link=2.0)
    choice = Choice(0.0, ("recompute", "keep"), (), peak=0, carried=40, pinned=0, bound=0.0)
    assert saver.with_choice(np.array([10.0, 19.0]), choice, start=1).tolist() == [20.0, 21.0]


def test_only_stages_that_are_over_take_more_time() -> None:
    saver = Saver(_costs(), capacity=70, host_link=1.0)
    plain = np.array([[[3.0, 9.0, 21.0], [6.0, 18.0, 18.0], [12.0, 12.0, 12.0]]])
    over = np.zeros((3, 3), dtype=bool)
    assert np.array_equal(saver.seconds(1, plain, over), plain)
    over[0, 2] = True
    bound = saver.seconds(1, plain, over)
    assert 21.0 <= bound[0, 0, 2] <= 22.0
    saver.choose(WHOLE, 21.0, 90, 90)
    chosen = saver.seconds(1, plain, over)
    assert chosen[0, 0, 2] == 22.0
    assert saver.seconds(2, plain, over)[0, 0, 2] != 22.0, "another number of micro-batches in flight"
    chosen[0, 0, 2] = 21.0
    assert np.array_equal(chosen, plain)
