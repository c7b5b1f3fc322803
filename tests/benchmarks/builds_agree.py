"""The same profiles on two builds of torch, such as a CPU build and a CUDA build without a GPU.

Run it by hand: `python tests/benchmarks/builds_agree.py --other /path/to/other/python`. Every model is profiled for
simulated devices and for GPUs by this interpreter and by the other one. The JSON of both must be equal, unless a row of
the tables in `autobalance.kernels.table` differs between the two releases of torch: such a difference is explained only
if the newer build, told to use the older release's rows, gives the older build's JSON to the letter. The script also
shows that traces leave transformers, torch's functions and its dispatcher as they were. It exits with 1 if anything is
left over.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402 # the repository's own packages come first
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import autobalance  # noqa: E402
from autobalance.kernels import versions  # noqa: E402
from autobalance.kernels.table import GROUP_NORM_COPIES, versioned  # noqa: E402
from autobalance.kernels.target import find_target  # noqa: E402
from tests.benchmarks.zoo import VARIANTS, ZOO, Model  # noqa: E402

TARGETS = ("simulated", "A100-80GB", "V100-16GB", "H100-80GB")
USED = ("plain", "bf16 autocast")


class Norms(nn.Module):
    """Every normalisation, a grouped query in float32 and dropouts: where builds of torch like to differ."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 128)
        self.rms, self.layer, self.group = nn.RMSNorm(128), nn.LayerNorm(128), nn.GroupNorm(8, 128)
        self.batch = nn.BatchNorm1d(128)
        self.query, self.key = nn.Linear(128, 128), nn.Linear(128, 64)
        self.lstm, self.head = nn.LSTM(128, 128, batch_first=True), nn.Linear(128, 5000)

    def self_balance(self) -> list[nn.Module]:
        """Every layer is a block."""
        return [*self.children()]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits by token."""
        value = F.dropout(self.layer(self.rms(self.embed(tokens))), 0.1)
        batch, length, _ = value.shape
        query = self.query(value).view(batch, length, 4, 32).transpose(1, 2)
        key = self.key(value).view(batch, length, 2, 32).transpose(1, 2)
        seen = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
        value = value + seen.transpose(1, 2).reshape(batch, length, 128)
        value = self.group(self.batch(value.transpose(1, 2).contiguous())).transpose(1, 2)
        logits: Tensor = self.head(self.lstm(value)[0])
        return logits


def _loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten())


def _tokens(size: int) -> dict[str, Tensor]:
    return {"tokens": torch.arange(size * 512).view(size, 512) % 5000}


MODELS = {**ZOO, "Norms": Model("Norms", Norms, _tokens, 8, _loss)}


def main() -> int:
    """Compare, or write the profiles of this interpreter to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", help="the interpreter of the other build")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS], metavar="MODEL", help="by name")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--assume", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        return _write(options.models, Path(options.write), options.assume)
    if not options.other:
        parser.error("say with --other which interpreter has the other build of torch")
    return _compare(sys.executable, options.other, options.models)


def _write(models: list[str], path: Path, assume: list[int] | None) -> int:
    warnings.simplefilter("ignore")
    for own in ("torch._dynamo", "torch.distributed.tensor"):
        import_module(own)  # torch changes names of its own when it imports these
    with autobalance.simulate(1):
        before = _state()  # simulated devices, once registered, stay so for the rest of the process
    assumed: AbstractContextManager[None] = versions.assuming((assume[0], assume[1])) if assume else nullcontext()
    with assumed:
        profiles = dict(_profiles(models, path.parent))
    changed = sorted(name for name, value in before.items() if _state().get(name, value) != value)
    content = {"torch": torch.__version__, "changed": changed, "watched": len(before), "profiles": profiles}
    path.write_text(json.dumps(content))
    return 0


def _profiles(models: list[str], scratch: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in models:
        zoo = MODELS[name]
        for used in USED:
            for target in TARGETS:
                variant = VARIANTS[used]
                with torch.device("meta"):
                    model = variant.apply(zoo.make())
                profile = autobalance.profile(
                    model,
                    zoo.batch(zoo.size),
                    optimizer=partial(torch.optim.AdamW, lr=1e-4),
                    precision=variant.precision,
                    step=zoo.step,
                    target=target,
                    clip=variant.clip,
                )
                profile.save(scratch / "profile.json")
                yield f"{name}, {used}, {target}", json.loads((scratch / "profile.json").read_text())


def _state() -> dict[str, int]:
    """Identity of every function and class that a trace could have replaced."""
    watched = [name for name in sys.modules if name.split(".")[0] == "transformers"]
    watched += ["torch", "torch.nn.functional", "torch.optim.optimizer", "torch.cuda"]
    state = {}
    for name in watched:
        for attribute, value in list(vars(sys.modules[name]).items()):
            if callable(value):
                state[f"{name}.{attribute}"] = id(value)
    from torch.optim import optimizer

    state["torch.optim.optimizer._foreach_supported_types"] = len(optimizer._foreach_supported_types)
    for operator in ("scaled_dot_product_attention", "rms_norm", "lstm.input"):
        state[f"aten::{operator}"] = hash(torch._C._dispatch_dump(f"aten::{operator}").replace("\n", ""))
    return state


def _compare(here: str, there: str, models: list[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        one, other = _run(here, models, Path(scratch)), _run(there, models, Path(scratch))
        (older, _), (newer, newer_python) = sorted(((one, here), (other, there)), key=lambda side: _release(side[0]))
        as_older = newer
        if _release(older) != _release(newer):
            as_older = _run(newer_python, models, Path(scratch), _release(older))
    print(f"{older['torch']} and {newer['torch']}: {len(older['profiles'])} profiles each")
    failures = sum(_judge(name, older, newer, as_older) for name in older["profiles"])
    for side in (older, newer):
        print(
            f"{side['torch']}: of {side['watched']} functions and classes, changed after the traces: {side['changed']}"
        )
        failures += len(side["changed"])
    print("every difference is explained" if failures == 0 else f"{failures} unexplained")
    return 1 if failures else 0


def _judge(name: str, older: dict[str, Any], newer: dict[str, Any], as_older: dict[str, Any]) -> int:
    """Say how a profile differs between the builds; 1 if that is not explained."""
    one, other, told = (side["profiles"][name] for side in (older, newer, as_older))
    if one == other:
        return 0
    where = ", ".join(_differences(one, other))
    if one != told:
        print(f"UNEXPLAINED {name}: {where}; with the older rows: {', '.join(_differences(one, told))}")
        return 1
    target = find_target(name.rsplit(", ", 1)[1])
    rows = versioned(target, _release(older), _release(newer))
    if not target.is_emulated:
        rows = [row for row in rows if row is GROUP_NORM_COPIES]  # the others choose between kernels of GPUs
    print(f"explained {name}, identical with the rows: {'; '.join(row.name for row in rows)}. Else {where}")
    return 0


def _differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two JSON values differ, the first few places."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*dict.fromkeys((*one, *other))]
        return [place for key in keys for place in _differences(one.get(key), other.get(key), f"{path}.{key}")][:3]
    if one == other:
        return []
    if isinstance(one, list) and isinstance(other, list):
        at = next(
            (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        inside = _differences(one[at], other[at], f"{path}[{at}]") if at < min(len(one), len(other)) else []
        lengths = [] if len(one) == len(other) else [f"{path.lstrip('.')}: {len(one)} and {len(other)} entries"]
        return [*lengths, *inside]
    return [f"{path.lstrip('.')}: {one} and {other}"]


def _run(python: str, models: list[str], scratch: Path, assume: tuple[int, int] | None = None) -> dict[str, Any]:
    path = scratch / "profiles.json"
    command = [python, __file__, "--write", str(path), "--models", *models]
    if assume is not None:
        command += ["--assume", *map(str, assume)]
    subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, cwd=ROOT)
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _release(side: dict[str, Any]) -> tuple[int, int]:
    major, minor = side["torch"].split("+")[0].split(".")[:2]
    return int(major), int(minor)


if __name__ == "__main__":
    sys.exit(main())
