"""BLOOM-176B that generates on 8 x 80 GiB with the first device free of its blocks, as its known hand-made map has it.

Run it by hand: `OMP_NUM_THREADS=1 python tests/benchmarks/bloom_low_0.py` (tools: `autobalance[benchmarks]`). A batch
of prompts is read and answered in bf16, token by token, with a cache of keys and values that grows; three layers are
traced, and the middle one is repeated. Batch and answer live on device 0 in all three maps: `balanced_low_0`,
`balanced`, and what accelerate makes of `max_memory={0: 0 GiB, 1 to 7: 51 GiB}`. Exit status 1 where device 0 of
`balanced_low_0` holds a block, where the others lie further apart than blocks allow, or where the largest batch
that leaves device 0 free is below that of the hand-made map.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from batch_search import largest_of_plans, largest_of_split
from large_models import bloom
from large_profiles import FOLDER
from other_splits import quiet
from rich.console import Console
from rich.table import Table
from torch import nn

import autobalance
from autobalance import Plan, Profile
from autobalance.timelines.splice import repeated

DEVICES, GIB, BATCH = 8, 2**30, 48
CAPACITIES = [80 * GIB] * DEVICES
RECIPE: dict[int | str, int | str] = {0: 0, **dict.fromkeys(range(1, DEVICES), 51 * GIB)}
LAYERS, TRACED = 70, 3
CLOSE = 0.02
HAND = "0 / 51 GiB x 7, by hand"
SAMPLES = 4
"""In the batch that is traced."""


def trace(prompt: int, answer: int) -> Profile:
    """The profile of a batch of prompts that are answered.

    Args:
        prompt: tokens of each.
        answer: tokens that are generated for each.
    """
    with torch.device("meta"):
        model = bloom(TRACED, use_cache=True)
    ids = torch.ones(SAMPLES, prompt, dtype=torch.long)

    def step(model: Any, batch: Any) -> Any:
        return model.generate(**batch, min_new_tokens=answer, max_new_tokens=answer, do_sample=False, pad_token_id=3)

    found = autobalance.profile(
        model.to(torch.bfloat16).eval(),
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        precision="bf16-true",
        step=step,
        training=False,
        target="A100-80GB",
        scalable=True,
    )
    return repeated(found, "transformer.h.1", LAYERS - TRACED)


def by_hand(profile: Profile) -> tuple[int, ...]:
    """The map that accelerate makes of the recipe, per block."""
    from accelerate import infer_auto_device_map

    with torch.device("meta"):
        model: nn.Module = bloom(LAYERS).to(torch.bfloat16)
    device_map = infer_auto_device_map(model, RECIPE, no_split_module_classes=["BloomBlock"])
    return autobalance.score(profile, device_map, CAPACITIES, root=0).assignment


class Question:
    """The profile at any batch, and plans for it."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.at = lru_cache(maxsize=8)(profile.scaled)

    def plan(self, policy: str, batch: int) -> Plan:
        """Ours, without micro-batches; what the root holds is on device 0."""
        pin = None if policy == "balanced_low_0" else {name: 0 for name, owner in self._profile.loose if owner < 0}
        return autobalance.plan(
            self.at(batch),
            CAPACITIES,
            policy=policy,
            micro_batches=1,
            schedule="naive",
            recompute=False,
            pin=pin,
            cache=False,
        )

    def with_free_first(self, batch: int) -> Plan | None:
        """Ours with no block on device 0, None where there is none for the batch."""
        found = self.plan("balanced_low_0", batch)
        return None if 0 in found.assignment else found

    def peaks(self, assignment: Sequence[int], root: int, batch: int) -> tuple[int, ...]:
        """Bytes per device."""
        return autobalance.score(self.at(batch), assignment, CAPACITIES, root=root).peaks


def main() -> int:
    """Plan, compare, and say whether device 0 is free and the others are even."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=64, help="tokens that are generated (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    quiet()
    path: Path = options.folder / f"BLOOM-176B, {options.prompt} + {options.answer} tokens.json"
    if not path.exists():
        options.folder.mkdir(parents=True, exist_ok=True)
        trace(options.prompt, options.answer).save(path)
    question = Question(Profile.load(path))
    low, balanced = (question.plan(policy, BATCH) for policy in ("balanced_low_0", "balanced"))
    hand = by_hand(question.at(BATCH))
    at, free = question.at, question.with_free_first
    rows = {
        "balanced_low_0": (low.assignment, low.root, largest_of_plans(at, free, CAPACITIES)),
        "balanced": (
            balanced.assignment,
            balanced.root,
            largest_of_plans(at, partial(question.plan, "balanced"), CAPACITIES),
        ),
        HAND: (hand, 0, largest_of_split(at, hand, 0, CAPACITIES)),
    }
    title = f"BLOOM-176B, bf16, {options.prompt} tokens answered by {options.answer}, batch {BATCH}: GiB and blocks"
    table = Table("map", *(f"device {device}" for device in range(DEVICES)), "largest batch", title=title)
    for name, (assignment, root, largest) in rows.items():
        peaks = question.peaks(assignment, root, BATCH)
        cells = [f"{peak / GIB:.2f} ({assignment.count(device)})" for device, peak in enumerate(peaks)]
        table.add_row(name, *cells, str(largest))
    Console(width=160).print(table)
    is_free = 0 not in low.assignment
    print(f"device 0 of balanced_low_0 {'holds no block' if is_free else 'holds blocks'}")
    even = is_even(question, low)
    return 0 if is_free and even and rows["balanced_low_0"][2] >= rows[HAND][2] else 1


def is_even(question: Question, plan: Plan) -> bool:
    """Whether all devices but the first lie within 2 % of each other, or no further apart than a layer; says which."""
    peaks = question.peaks(plan.assignment, plan.root, BATCH)[1:]
    spread = max(peaks) - min(peaks)
    one, two = (question.peaks(_middle(plan, count), 0, BATCH)[1] for count in (1, 2))
    print(
        f"the others lie {max(peaks) / min(peaks) - 1:.1%} ({spread / GIB:.2f} GiB) apart; one layer more takes "
        f"{(two - one) / GIB:.2f} GiB; that no whole blocks are split better is {'' if plan.optimal else 'not '}proved"
    )
    return spread <= CLOSE * min(peaks) or (plan.optimal and spread <= (1 + CLOSE) * (two - one))


def _middle(plan: Plan, count: int) -> list[int]:
    """A split in which device 1 holds so many layers from the middle."""
    blocks = len(plan.assignment)
    return [1 if blocks // 2 <= block < blocks // 2 + count else 2 for block in range(blocks)]


if __name__ == "__main__":
    sys.exit(main())
