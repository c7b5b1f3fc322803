from __future__ import annotations

import subprocess
import sys


def test_the_allocator_and_what_replays_through_it_import_no_torch() -> None:
    modules = [
        "autobalance.allocator.replay",
        "autobalance.partitioning.replay",
        "autobalance.profiling.profile",
        "autobalance.timelines.scaling",
        "autobalance.timelines.splice",
    ]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
