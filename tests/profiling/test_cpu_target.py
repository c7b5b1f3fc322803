"""Peaks predicted for the CPU are those that its own allocator reports to `torch.profiler`, a counter of torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import autobalance
from autobalance.kernels import cpu
from tests.benchmarks.cpu_truth import Counted, count

WIDTH, ROWS = 128, 64
PHASES = ("forward+backward", "optimizer")


class Perceptron(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = self._block(layer, x) if self.reentrant is None else self._checkpointed(layer, x)
        return x

    def _block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return F.dropout(F.gelu(layer(x)), 0.1)

    def _checkpointed(self, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(self._block, layer, x, use_reentrant=self.reentrant, preserve_rng_state=False)


class Attention(nn.Module):
    """Embedding, causal attention with dropout, and a loss over words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 500)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.layer(self.embed(ids), src_mask=mask, is_causal=True))


class Convolutional(nn.Module):
    """16 and 32 channels, which fill oneDNN's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.second(F.relu(self.first(x))))).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Quantized(nn.Module):
    """Weights in 8 bits with a trained scale, and a plain attribute that decides on a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(WIDTH, 1))
        self.kept = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        assert not self.kept.any()
        return F.linear(x, self.packed.to(x.dtype) * self.scale)


class Experts(nn.Module):
    """Each row goes to the expert that scores it highest, which only real numbers tell."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        made = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            made = made.index_add(0, rows, expert(x[rows]))
        return made


def square(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch), batch)


def entropy(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch)
    return F.cross_entropy(logits.flatten(0, -2), torch.zeros(logits.shape[:-1].numel(), dtype=torch.long))


@dataclass(frozen=True)
class Training:
    """A model and how it is trained."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    step: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=dict)
    slack: int = 1024  # bytes: counters and flags, of which a step holds a few that no operation is seen to make

    def run(self, batch: Tensor, mark: Callable[[str], None], steps: int = 3) -> None:
        """As a user would write it."""
        precision = self.options.get("precision", "32-true")
        model = self.make()
        if precision == "bf16-true":
            model = model.bfloat16()
        optimizer = self.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        scaler = torch.amp.GradScaler("cpu", enabled=precision == "16-mixed")
        accumulate = self.options.get("accumulate", 1)
        for number in range(1, steps + 1):
            for part in range(accumulate):
                given = batch.clone()
                if part == 0:
                    optimizer.zero_grad()
                mark(f"step {number} forward")
                half = torch.float16 if precision.startswith("16") else torch.bfloat16
                with torch.autocast("cpu", half, enabled="mixed" in precision):
                    loss = self.step(model, given)
                mark(f"step {number} backward")
                scaler.scale(loss / accumulate if accumulate > 1 else loss).backward()
            mark(f"step {number} optimizer")
            if "clip" in self.options:
                nn.utils.clip_grad_norm_(model.parameters(), self.options["clip"])
            scaler.step(optimizer)
            scaler.update()
            mark(f"step {number} end")

    def counted(self) -> Counted:
        batch = self.batch()
        if self.options.get("precision") == "bf16-true":
            batch = batch.bfloat16()
        # Of products in 16 bits oneDNN sizes the sums by the machine's caches, which no table knows.
        return count(partial(self.run, batch), ["aten::mm", "aten::addmm"])

    def profile(self) -> autobalance.Profile:
        return autobalance.profile(
            self.make(), self.batch(), optimizer=self.optimizer, step=self.step, target="cpu", **self.options
        )


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def words() -> Tensor:
    return torch.randint(500, (4, 32))


def images() -> Tensor:
    return torch.randn(4, 3, 24, 24)


def sequences() -> Tensor:
    return torch.randn(4, 20, WIDTH)


momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TRAININGS = {
    "perceptron": Training(Perceptron, rows, square),
    "foreach": Training(Perceptron, rows, square, partial(torch.optim.AdamW, foreach=True)),
    "momentum": Training(Perceptron, rows, square, momentum),
    "adafactor": Training(Perceptron, rows, square, torch.optim.Adafactor),
    "autocast": Training(Perceptron, rows, square, options={"precision": "bf16-mixed"}),
    "gradient scaler": Training(Perceptron, rows, square, options={"precision": "16-mixed"}),
    "half precision": Training(Perceptron, rows, square, options={"precision": "bf16-true"}),
    "accumulation": Training(Perceptron, rows, square, momentum, {"accumulate": 3}),
    "clipping": Training(Perceptron, rows, square, momentum, {"clip": 1.0}),
    "checkpoint": Training(partial(Perceptron, False), rows, square),
    "checkpoint, reentrant": Training(partial(Perceptron, True), rows, square),
    "8-bit weights": Training(Quantized, rows, square),
    "8-bit weights, half precision": Training(Quantized, rows, square, options={"precision": "bf16-true"}),
    "attention": Training(Attention, words, entropy),
    "attention, autocast": Training(Attention, words, entropy, options={"precision": "bf16-mixed"}),
    "convolutions": Training(Convolutional, images, entropy),
    # oneDNN's kernels for cells have small buffers of their own.
    "lstm": Training(Recurrent, sequences, entropy, slack=25_000),
    "lstm, autocast": Training(Recurrent, sequences, entropy, options={"precision": "bf16-mixed"}, slack=30_000),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_peaks_are_those_that_the_allocator_tells(name: str) -> None:
    training = TRAININGS[name]
    truth, profile = training.counted(), training.profile()
    for step in (1, 2, 3):
        for phase in PHASES:
            expected = truth.peak(step, phase, without_scratch=True)
            assert profile.peak(step, phase=phase) == pytest.approx(expected, abs=training.slack), (step, phase)
    assert all("cannot run on fake tensors" not in note for note in profile.notes)


def test_experts_are_chosen_equally_often_and_the_profile_says_so() -> None:
    training = Training(Experts, rows, square)
    profile = training.profile()
    assert any("choice(s) that only real data know" in note for note in profile.notes)
    # However rows are shared out, the experts hold all of them together: only what one holds alone differs.
    expected = training.counted().peak(2, PHASES[0])
    assert profile.peak(2, phase=PHASES[0]) == pytest.approx(expected, rel=0.03)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="blocks of 16 channels are AVX512's")
def test_counter_tells_scratch_of_an_operation_apart() -> None:
    image, weight = torch.randn(4, 16, 24, 24), torch.randn(32, 16, 3, 3)
    counted = count(lambda mark: (mark("call"), F.conv2d(image, weight))[0], ["aten::conv2d"])
    # oneDNN's own copies of the image, the weight and the output, of which the first two are gone before the fourth.
    of_image, of_weight, of_output = 4 * 16 * 24 * 24 * 4, 32 * 16 * 9 * 4, 4 * 32 * 22 * 22 * 4
    assert counted.scratch == {"aten::conv2d": of_image + of_weight + of_output}
    assert (counted.peaks["call"], counted.without["call"]) == (2 * of_output, of_output)


# --- what the CPU's kernels take and keep

onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("time", "batch", "features", "width"),
    [(9, 4, 64, 64), (3, 4, 24, 40), (5, 3, 7, 9), (4, 2, 256, 128), (2, 5, 64, 256), (1, 1, 512, 64)],
)
def test_workspace_of_an_lstm_is_as_large_as_the_kernels(
    time: int, batch: int, features: int, width: int, dtype: torch.dtype
) -> None:
    source = torch.randn(time, batch, features, dtype=dtype)
    weights = [
        torch.randn(shape, dtype=dtype)
        for shape in ((4 * width, features), (4 * width, width), (4 * width,), (4 * width,))
    ]
    state = torch.zeros(batch, width, dtype=dtype)
    made = torch.ops.aten.mkldnn_rnn_layer(
        source, *weights, state, state, False, [], 2, width, 1, True, False, False, True
    )
    assert cpu.recurrent_workspace(source, width, 2) == made[3].nbytes


@onednn
@pytest.mark.parametrize(
    ("channels", "out", "kernel", "stride", "batch"),
    [(32, 32, 3, 1, 4), (3, 32, 3, 1, 4), (3, 64, 7, 2, 8), (32, 64, 1, 1, 16), (32, 64, 1, 1, 4), (128, 128, 3, 1, 2)],
)
def test_scratch_of_a_convolution_is_what_the_kernel_takes(
    channels: int, out: int, kernel: int, stride: int, batch: int
) -> None:
    image = torch.randn(batch, channels, *[4 if channels == 128 else 16] * 2)  # a large weight outgrows small images
    weight = torch.randn(out, channels, kernel, kernel)
    shape = ([stride, stride], [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
    forward = (image, weight, None, *shape)
    made = torch.ops.aten.convolution(*forward)
    assert cpu.taken_inside(torch.ops.aten.convolution.default, forward, made) == _scratch(
        lambda: torch.ops.aten.convolution(*forward)
    )
    backward = (made, image, weight, None, *shape, [channels > 3, True, False])
    results = [
        result if wanted else None
        for result, wanted in zip(torch.ops.aten.convolution_backward(*backward), backward[-1], strict=True)
    ]
    assert cpu.taken_inside(torch.ops.aten.convolution_backward.default, backward, results) == _scratch(
        lambda: torch.ops.aten.convolution_backward(*backward)
    )


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("channels", "size"), [(8, 64), (2, 64), (8, 80), (2, 80)])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear"])
def test_scratch_of_upsampling_is_what_the_kernel_takes(mode: str, channels: int, size: int, last: bool) -> None:
    image = torch.randn(2, channels, 16, 16)
    image = image.contiguous(memory_format=torch.channels_last) if last else image
    made = F.interpolate(image, size=size, mode=mode)
    func = {
        "nearest": torch.ops.aten.upsample_nearest2d.default,
        "nearest-exact": torch.ops.aten._upsample_nearest_exact2d.default,
        "bilinear": torch.ops.aten.upsample_bilinear2d.default,
    }[mode]
    taken = _scratch(lambda: F.interpolate(image, size=size, mode=mode))
    assert taken - cpu.taken_inside(func, (image,), made) in range(_INDICES)


_INDICES = 8192
"""Bytes that the other kernels take for positions and weights of rows and columns."""


def _scratch(run: Callable[[], Any]) -> int:
    """Most bytes that a call holds beside what it returns."""
    kept: list[Any] = []

    def marked(mark: Callable[[str], None]) -> None:
        mark("call")
        kept.append(run())

    counted = count(marked)
    made = kept[0] if isinstance(kept[0], tuple) else (kept[0],)
    return counted.peaks["call"] - sum(result.nbytes for result in made if result is not None)


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"])
def test_reduced_loss_holds_as_much_as_the_losses_of_all_elements(name: str) -> None:
    value = torch.rand(8, 16)
    real = getattr(F, name)(value, value)
    with FakeTensorMode():
        fakes = torch.empty(8, 16), torch.empty(8, 16)
        fake = cpu.carry_out(getattr(torch.ops.aten, name).default, fakes, {})
    assert fake.shape == real.shape == ()
    assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes() == value.nbytes


@pytest.mark.parametrize("columns", [8, 6])
def test_grouped_product_is_laid_out_as_the_kernel_does(columns: int) -> None:
    rows, groups = torch.randn(6, 8), torch.randn(2, columns, 8).transpose(1, 2)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    real = F.grouped_mm(rows, groups, offs=ends)
    meta = (tensor.to("meta") for tensor in (rows, groups, ends))
    fake = cpu.carry_out(torch.ops.aten._grouped_mm.default, tuple(meta), {})
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
