"""Profiles of the large models, traced once and then read from files.

Run it by hand: `OMP_NUM_THREADS=1 python tests/benchmarks/large_profiles.py` (tools: `autobalance[benchmarks]`).
Tracing all of them takes a while; a profile that is in the folder already is not traced again, and a folder is for
one state of the sources that make profiles. Each knows its bytes at any batch.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from large_models import LARGE, MODES

import autobalance
from autobalance import Profile

TARGET = "A100-80GB"
# What decides what a profile says, beside the models.
_ROOMS = ("profiling", "kernels", "timelines", "compat", "measuring", "simulated")


def digest_of_sources() -> str:
    """A few letters that are others after a change of what traces, so that no old profile is taken for a new one."""
    package = Path(autobalance.__file__).parent
    files = [path for room in _ROOMS for path in sorted((package / room).rglob("*.py"))]
    content = hashlib.sha256()
    for path in (*files, Path(__file__).with_name("large_models.py")):
        content.update(f"{path.name}\n".encode() + path.read_bytes())
    return content.hexdigest()[:10]


FOLDER = Path(tempfile.gettempdir()) / f"autobalance-large-models-{digest_of_sources()}"


def profile_of(name: str, mode: str, folder: Path = FOLDER) -> Profile:
    """The profile of a model, from the folder, or traced and left there.

    Args:
        name: of a model.
        mode: "training" or "inference".
        folder: where profiles lie.
    """
    path = folder / f"{name}, {mode}.json"
    if path.exists():
        return Profile.load(path)
    large = LARGE[name]
    training = mode == "training"
    found = autobalance.profile(
        large.build(mode),
        large.batch(large.samples),
        optimizer=torch.optim.AdamW if training else None,
        precision="bf16-mixed" if training else "bf16-true",
        step=large.step if training else large.answer,
        training=training,
        target=TARGET,
        scalable=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    found.save(path)
    return found


def main() -> int:
    """Trace what the folder lacks, and say of each profile what it knows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(LARGE), default=list(LARGE))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the profiles (default: %(default)s)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    scalable = True
    for name in options.models:
        for mode in options.modes:
            start = time.perf_counter()
            found = profile_of(name, mode, options.folder)
            seconds = time.perf_counter() - start
            peaks = ", ".join(_peak(found, size) for size in (1, 8))
            print(
                f"{name} ({LARGE[name].size}), {mode}: {len(found.blocks)} blocks, {peaks}, {seconds:.0f} s", flush=True
            )
            for note in found.notes:
                print(f"    {note}", flush=True)
            scalable &= not any("not known" in note for note in found.notes)
    return 0 if scalable else 1


def _peak(profile: Profile, size: int) -> str:
    try:
        return f"{profile.peak(batch_size=size) / 2**30:.2f} GiB at a batch of {size}"
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
