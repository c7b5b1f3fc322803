"""What a GPU allocates and reserves at its peak, against the prediction: MLP, ResNet-50, GPT-2, Llama.

Run it by hand: `python tests/benchmarks/cuda_peaks.py`. On a machine with a GPU each model trains three steps in a
process of its own, and the table shows `max_memory_allocated` and `max_memory_reserved` beside two predictions: of this
process, which sees the GPU, and of one that does not. It exits with 1 if a prediction of allocated bytes is off by more
than 2 %, or of reserved bytes by more than 4 %. Without a GPU the table shows the predictions alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402 # the repository's own packages come first
from torch import Tensor, nn  # noqa: E402

import autobalance  # noqa: E402
from autobalance.devices.table import recognise  # noqa: E402
from tests.benchmarks.zoo import ResNet, classify, images, own_loss, text  # noqa: E402

ALLOCATED, RESERVED = 0.02, 0.04
"""Bars: shares of what the GPU shows."""
STEPS = 3
MIB = 2**20


@dataclass(frozen=True)
class Model:
    """A model as it is trained on one GPU.

    Attributes:
        make: builds it, under `torch.device("meta")` too.
        batch: one batch, on the host.
        step: `step(model, batch) -> loss`.
        precision: as Lightning names it.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    step: Callable[[nn.Module, Any], Tensor]
    precision: str = "32-true"


class Wide(nn.Module):
    """Eight linear layers of width 4096."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(8))

    def forward(self, inputs: Tensor) -> Tensor:
        """Through every layer and a GELU."""
        for layer in self.layers:
            inputs = nn.functional.gelu(layer(inputs))
        return inputs


def _numbers() -> dict[str, Tensor]:
    return {"inputs": torch.zeros(4096, 4096)}


def _mean_square(model: nn.Module, batch: Any) -> Tensor:
    result: Tensor = model(batch["inputs"]).square().mean()
    return result


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=50257, n_positions=1024, use_cache=False))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=5504,
            num_hidden_layers=12,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=2048,
            use_cache=False,
        )
    )


MODELS = {
    "MLP": Model(Wide, _numbers, _mean_square),
    "ResNet-50": Model(partial(ResNet, (3, 4, 6, 3), 4), partial(images, 64, pixels=224), classify),
    "GPT-2": Model(_gpt2, partial(text, 8, length=1024), own_loss, "bf16-mixed"),
    "Llama": Model(_llama, partial(text, 2, length=2048), own_loss, "bf16-mixed"),
}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """AdamW as torch defaults it for the device."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def predict(name: str, target: str) -> tuple[int, int]:
    """Bytes allocated and reserved at the peak.

    Args:
        name: of the model.
        target: a GPU's name, or "cuda" for the one that is there.
    """
    used = MODELS[name]
    with torch.device("meta"):
        model = used.make()
    profile = autobalance.profile(
        model, used.batch(), optimizer=optimizer_of, precision=used.precision, step=used.step, target=target
    )
    return profile.peak(step=STEPS), profile.peak(reserved=True)


def measure(name: str) -> tuple[int, int]:
    """Train on the GPU that is there: `max_memory_allocated` of the last step, `max_memory_reserved` of all.

    Args:
        name: of the model; in a process that has not used the GPU before.
    """
    used, device = MODELS[name], torch.device("cuda", 0)
    model = used.make().to(device)
    optimizer = optimizer_of(model.parameters())
    loss = None
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats(device)
        batch = {key: value.to(device) for key, value in used.batch().items()}
        optimizer.zero_grad(set_to_none=True)
        mixed = used.precision != "32-true"
        with torch.autocast("cuda", torch.bfloat16) if mixed else nullcontext():
            loss = used.step(model, batch)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize(device)
    assert loss is not None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def main() -> int:
    """Print the table; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS], metavar="MODEL", help="by name")
    parser.add_argument("--target", help="whose kernels to predict without a GPU: a GPU's name (default: an A100)")
    parser.add_argument("--only", choices=("predict", "measure"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.only:
        work = measure if options.only == "measure" else partial(predict, target=options.target or "cuda")
        print(json.dumps({name: work(name) for name in options.models}))
        return 0
    return _table(options.models, options.target)


def _table(models: list[str], target: str | None) -> int:
    started = time.monotonic()
    there = torch.cuda.is_available()
    gpu = recognise(torch.cuda.get_device_name(0)) if there else None
    target = target or (gpu.name if gpu is not None else "A100-80GB")
    shown = torch.cuda.get_device_name(0) if there else "no GPU here: predictions alone"
    print(f"torch {torch.__version__}, {shown}; kernels of {target}, {STEPS} steps, MiB allocated / reserved")
    missed = 0
    for name in models:
        line = f"{name:10} without a GPU {_shown(apart := _elsewhere(name, 'predict', target, hidden=True))}"
        if there:
            real, beside = _elsewhere(name, "measure", None), _elsewhere(name, "predict", None)
            line += (
                f"  with it {_shown(beside)}  measured {_shown(real)}  off by {_off(apart, real)}, {_off(beside, real)}"
            )
            missed += sum(not within(prediction, real) for prediction in (apart, beside))
        print(line, flush=True)
    print(f"{time.monotonic() - started:.0f} s")
    return 1 if missed else 0


def within(predicted: tuple[int, int], real: tuple[int, int]) -> bool:
    """Whether both figures keep their bars."""
    bars = (ALLOCATED, RESERVED)
    return all(abs(one - other) <= bar * other for one, other, bar in zip(predicted, real, bars, strict=True))


def _elsewhere(name: str, what: str, target: str | None, hidden: bool = False) -> tuple[int, int]:
    """Run one half in a process of its own, with or without the GPU."""
    command = [sys.executable, __file__, "--only", what, "--models", name]
    if target is not None:
        command += ["--target", target]
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if hidden else {})}
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment)
    allocated, reserved = json.loads(result.stdout.strip().splitlines()[-1])[name]
    return allocated, reserved


def _shown(figures: tuple[int, int]) -> str:
    return f"{figures[0] / MIB:8.1f} / {figures[1] / MIB:8.1f}"


def _off(predicted: tuple[int, int], real: tuple[int, int]) -> str:
    return " / ".join(f"{one / other - 1:+.2%}" for one, other in zip(predicted, real, strict=True))


if __name__ == "__main__":
    sys.exit(main())
