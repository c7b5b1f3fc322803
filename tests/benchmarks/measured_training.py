"""How the measured runs trained, as steps that can be profiled: what an A100 reserves for them, from a profile.

TIMM's runs are those of its `train.py` without options: SGD with Nesterov momentum 0.9 and weight decay 2e-5 (none for
vectors), float32 with TF32 kernels, channels first, cuDNN's benchmark on, label smoothing 0.1, no average of weights,
images as large as the model wants them, which the loader prefetches as bytes and converts on the GPU.
MLPs: Adam and cross-entropy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from measured_runs import Mlp
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer

import autobalance
from autobalance.allocator.settings import AllocatorSettings
from autobalance.timelines.scaling import with_batch_sizes

TARGET = "A100-40GB"
TRACED = 8, 16
"""Batch sizes whose traces give bytes as a function of the batch."""
SMOOTHING = 0.1
IMAGE_SIZES = {"ese_vovnet57b": 224, "mobilenetv3_large_150d": 224, "sam2_hiera_tiny": 224}
"""Models whose default weights, and with them the size of their images, changed after the runs (TIMM 1.0.9)."""


@dataclass(frozen=True)
class Predicted:
    """What a profile says of a TIMM model.

    Attributes:
        family: the file of TIMM that the model is defined in.
        is_transformer: whether it has attention, and no convolution but for patches that do not overlap.
        trains: whether it has classes, without which the loss fails.
        reserved: bytes that the allocator reserves, by batch size.
    """

    family: str
    is_transformer: bool
    trains: bool
    reserved: dict[int, int]


def predict_timm(name: str, sizes: Sequence[int]) -> Predicted:
    """Profile a TIMM model.

    Args:
        name: of the model.
        sizes: batch sizes.
    """
    with torch.device("meta"):
        import timm  # not needed for multilayer perceptrons

        model = timm.create_model(name)
    reserved = _reserved_by_size(model, _image_shape(name, model), sizes) if model.num_classes else {}
    return Predicted(_family(name), _is_transformer(model), bool(model.num_classes), reserved)


def _reserved_by_size(model: nn.Module, shape: Sequence[int], sizes: Sequence[int]) -> dict[int, int]:
    def profile(samples: int) -> autobalance.Profile:
        batch = torch.zeros(samples, *shape), torch.zeros(samples, dtype=torch.long)
        return autobalance.profile(model, batch, optimizer=_sgd, step=_TimmStep(), target=TARGET)

    one, other = TRACED
    with _cudnn_benchmark():
        found = with_batch_sizes(profile(one), one, profile, [other])
        if found.timeline.per_sample:
            return {size: _reserved(found, size) for size in sizes}
        return {size: _reserved(profile(size)) for size in sizes}


def reserved_by_mlp(mlp: Mlp) -> int:
    """Bytes that the allocator reserves for a multilayer perceptron."""
    with torch.device("meta"):
        model = build_mlp(mlp)
    batch = torch.zeros(mlp.batch_size, mlp.inputs), torch.zeros(mlp.batch_size, dtype=torch.long)
    return _reserved(autobalance.profile(model, batch, optimizer=Adam, step=_mlp_step, target=TARGET))


def build_mlp(mlp: Mlp) -> nn.Sequential:
    """The perceptron that a row of the file describes."""
    layers: list[nn.Module] = []
    width = mlp.inputs
    for kind, size in mlp.layers:
        layers.append(_layer(kind, width, size, mlp.dropout))
        width = size
    return nn.Sequential(*layers)


def _image_shape(name: str, model: Any) -> tuple[int, int, int]:
    channels, height, width = model.pretrained_cfg["input_size"]
    side = IMAGE_SIZES.get(name)
    return (channels, side, side) if side else (channels, height, width)


def _is_transformer(model: nn.Module) -> bool:
    attends = any("attn" in part for part, _ in model.named_modules())
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    return attends and all(module.kernel_size == module.stride != (1, 1) for module in convolutions)


def _family(name: str) -> str:
    import timm

    return str(timm.models.model_entrypoint(name).__module__.rpartition(".")[2])


def _reserved(profile: autobalance.Profile, batch_size: int | None = None) -> int:
    return profile.peak(reserved=True, batch_size=batch_size, settings=AllocatorSettings())


def _sgd(parameters: Sequence[Tensor]) -> Optimizer:
    vectors, others = ([each for each in parameters if (each.dim() <= 1) is wanted] for wanted in (True, False))
    groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": 0.0}, {"params": others}]
    return SGD([group for group in groups if group["params"]], lr=0.05, momentum=0.9, weight_decay=2e-5, nesterov=True)


class _TimmStep:
    """The loss of a batch, beside what TIMM's loader holds on a stream of its own: nothing else can use that memory.

    When it converts the batch after the next one (timm/data/loader.py, PrefetchLoader), the batch that was worked on,
    the next one and that one are on the GPU, and the bytes it is made from.
    """

    def __init__(self) -> None:
        self._loader: list[Tensor] = []

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        if not self._loader:
            self._loader = [images.byte(), images.clone(), images.clone()]
        log_probabilities = functional.log_softmax(model(images), dim=-1)
        likelihood = -log_probabilities.gather(dim=-1, index=labels.unsqueeze(1)).squeeze(1)
        loss = (1.0 - SMOOTHING) * likelihood - SMOOTHING * log_probabilities.mean(dim=-1)
        return loss.mean()


def _mlp_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


@contextmanager
def _cudnn_benchmark() -> Iterator[None]:
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _layer(kind: str, width: int, size: int, dropout: float) -> nn.Module:
    if kind == "linear":
        return nn.Linear(width, size)
    if kind == "batch_normalization":
        return nn.BatchNorm1d(width)
    if kind == "dropout":
        return nn.Dropout(dropout)
    if kind == "Softmax":
        return nn.Softmax(dim=1)
    made: nn.Module = getattr(nn, kind)()
    return made
