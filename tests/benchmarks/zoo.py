"""Small models of every family, with batches, steps and the ways in which they are trained, for scripts that compare.

Each trains a step in about a second on one core, and holds tens to hundreds of MiB, so that a peak is no rounding.
The transformers are built from configurations; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 8192
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Model:
    """A model of the zoo.

    Attributes:
        name: in words.
        make: builds it, under `torch.device("meta")` too.
        batch: a batch of a number of samples, the same every time.
        size: number of samples in the usual batch.
        step: `step(model, batch) -> loss`.
        convolutional: whether most of its memory belongs to convolutions, whose kernels take scratch.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    size: int
    step: Callable[[nn.Module, Any], Tensor]
    convolutional: bool = False


@dataclass(frozen=True)
class Variant:
    """A way to train a model.

    Attributes:
        name: in words.
        optimizer: builds the optimizer on parameters.
        precision: as Lightning names it.
        accumulate: batches whose gradients are added before a step.
        clip: largest norm of the gradients.
        reentrant: kind of activation checkpointing; None: none.
        frozen: whether the first half of the parameters is frozen.
    """

    name: str
    optimizer: MakeOptimizer = field(default=partial(torch.optim.AdamW, lr=1e-4))
    precision: str = "32-true"
    accumulate: int = 1
    clip: float | None = None
    reentrant: bool | None = None
    frozen: bool = False

    def apply(self, model: nn.Module) -> nn.Module:
        """Freeze and checkpoint as the variant says, in place."""
        if self.frozen:
            parameters = list(model.parameters())
            for parameter in parameters[: len(parameters) // 2]:
                parameter.requires_grad_(False)
        if self.reentrant is not None:
            _checkpoint(model, self.reentrant)
        return model


def train(
    model: nn.Module, drawn: dict[str, Tensor], zoo: Model, variant: Variant, steps: int, mark: Callable[[str], None]
) -> None:
    """An ordinary loop on the CPU: gradients dropped, batches accumulated, clipped, stepped.

    Args:
        model: already changed by `variant.apply`.
        drawn: the batch, of which every step gets a copy, as a loader would give it one.
        zoo: where it comes from.
        variant: how it is trained.
        steps: optimizer steps.
        mark: told "step 1 forward", "step 1 backward", "step 1 optimizer", "step 1 end", ... at the start of each.
    """
    model.train()
    optimizer = variant.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    for number in range(1, steps + 1):
        for part in range(variant.accumulate):
            batch = {name: tensor.clone() for name, tensor in drawn.items()}
            if part == 0:
                optimizer.zero_grad()
            mark(f"step {number} forward")
            with torch.autocast("cpu", torch.bfloat16, enabled=variant.precision == "bf16-mixed"):
                loss = zoo.step(model, batch)
            mark(f"step {number} backward")
            (loss / variant.accumulate if variant.accumulate > 1 else loss).backward()
        mark(f"step {number} optimizer")
        if variant.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), variant.clip)
        optimizer.step()
        mark(f"step {number} end")


class Checkpointed(nn.Module):
    """A module whose forward is checkpointed."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, *inputs: Any) -> Any:
        return checkpoint(self.inner, *inputs, use_reentrant=self.reentrant)


def _checkpoint(model: nn.Module, reentrant: bool) -> None:
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if getattr(child, "is_block", False):
                setattr(parent, name, Checkpointed(child, reentrant))


# --- models of our own


class Mlp(nn.Module):
    """Linear layers of width 2048."""

    def __init__(self, width: int = 2048, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(256, width)
        self.layers = nn.ModuleList(MlpBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class MlpBlock(nn.Module):
    is_block = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


class Residual(nn.Module):
    """The block of a ResNet: two 3 x 3 convolutions, or three around a bottleneck."""

    is_block = True

    def __init__(self, channels: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        out = width * expansion
        shapes = (
            [(channels, width, 3, stride), (width, out, 3, 1)]
            if expansion == 1
            else [(channels, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
        )
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, size, step, size // 2, bias=False) for before, after, size, step in shapes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _, after, _, _ in shapes)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.short = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for index, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y))
            if index + 1 < len(self.convolutions):
                y = F.relu(y, inplace=True)
        return F.relu(y + self.short(x), inplace=True)


class ResNet(nn.Module):
    """ResNet-18 (expansion 1) or ResNet-50 (expansion 4), as in He et al. 2015."""

    def __init__(self, depths: tuple[int, ...], expansion: int, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        channels, blocks = 64, []
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            for index in range(depth):
                blocks.append(Residual(channels, width, 2 if stage and not index else 1, expansion))
                channels = width * expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x)), inplace=True), 3, 2, 1)
        return self.head(F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))


class ConvolutionBlock(nn.Module):
    is_block = True

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, channels), nn.GroupNorm(8, out)])
        self.convolutions = nn.ModuleList([nn.Conv2d(channels, out, 3, 1, 1), nn.Conv2d(out, out, 3, 1, 1)])
        self.short = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolutions[0](F.silu(self.norms[0](x)))
        return self.convolutions[1](F.silu(self.norms[1](y))) + self.short(x)


class PixelAttention(nn.Module):
    is_block = True

    def __init__(self, channels: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, channels)
        self.project = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        split = self.project(pixels).view(len(x), height * width, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*split.unbind(0)).transpose(1, 2).reshape(pixels.shape)
        return x + self.out(mixed).transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """A U-Net of diffusion models: convolutions on the way down and up, attention at the bottom, skips between."""

    def __init__(self, channels: tuple[int, ...] = (64, 128, 256)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels[0], 3, 1, 1)
        before = (channels[0], *channels[:-1])
        self.down = nn.ModuleList(ConvolutionBlock(*pair) for pair in zip(before, channels, strict=True))
        self.middle = nn.Sequential(
            ConvolutionBlock(channels[-1], channels[-1]),
            PixelAttention(channels[-1]),
            ConvolutionBlock(channels[-1], channels[-1]),
        )
        self.up = nn.ModuleList(
            ConvolutionBlock(2 * width, out) for out, width in reversed([*zip(before, channels, strict=True)])
        )
        self.head = nn.Conv2d(channels[0], 3, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.head(x)


class RecurrentBlock(nn.Module):
    is_block = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Recurrent(nn.Module):
    """A language model of LSTM layers with dropout between them."""

    def __init__(self, width: int = 512, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(RecurrentBlock(width) for _ in range(layers))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = self.dropout(layer(x))
        return self.head(x)


# --- models of transformers


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=256,
            n_embd=256,
            n_layer=4,
            n_head=8,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder(num_hidden_layers=4, intermediate_size=688)))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            **_decoder(num_hidden_layers=2, intermediate_size=512), num_local_experts=4, num_experts_per_tok=2
        )
    )


def _decoder(**more: Any) -> dict[str, Any]:
    """Grouped queries: 8 heads share 2 keys and values."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "use_cache": False,
        **more,
    }


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=256,
            d_kv=32,
            d_ff=1024,
            num_layers=3,
            num_heads=8,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=8,
            intermediate_size=1024,
            image_size=96,
            patch_size=8,
            num_labels=1000,
        )
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=8,
            intermediate_size=1024,
            max_position_embeddings=256,
            use_cache=False,
        )
    )


# --- batches and steps


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def vectors(size: int) -> dict[str, Tensor]:
    draw = _draw()
    return {"x": torch.randn(size, 256, generator=draw), "y": torch.randint(64, (size,), generator=draw)}


def images(size: int, pixels: int) -> dict[str, Tensor]:
    draw = _draw()
    return {
        "x": torch.randn(size, 3, pixels, pixels, generator=draw),
        "y": torch.randint(1000, (size,), generator=draw),
    }


def pictures(size: int) -> dict[str, Tensor]:
    draw = _draw()
    return {
        "pixel_values": torch.randn(size, 3, 96, 96, generator=draw),
        "labels": torch.randint(1000, (size,), generator=draw),
    }


def noisy(size: int) -> dict[str, Tensor]:
    draw = _draw()
    return {"x": torch.randn(size, 3, 64, 64, generator=draw), "y": torch.randn(size, 3, 64, 64, generator=draw)}


def sequences(size: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (size, length + 1), generator=_draw())
    return {"x": ids[:, :-1].contiguous(), "y": ids[:, 1:].contiguous()}


def text(size: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (size, length), generator=_draw())
    return {"input_ids": ids, "labels": ids.clone()}


def padded(size: int, length: int) -> dict[str, Tensor]:
    """Texts of lengths between half and all of `length`, with the mask of the padding."""
    lengths = torch.linspace(length // 2, length, size).round().long()
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    return {**text(size, length), "attention_mask": mask}


def classify(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy on the last dimension."""
    logits = model(batch["x"])
    return F.cross_entropy(logits.flatten(0, -2), batch["y"].flatten())


def denoise(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model itself computes."""
    loss: Tensor = model(**batch).loss
    return loss


ZOO = {
    model.name: model
    for model in (
        Model("MLP", Mlp, vectors, 512, classify),
        Model("GPT-2", gpt2, partial(text, length=256), 4, own_loss),
        Model("Llama", llama, partial(text, length=256), 4, own_loss),
        Model("T5", t5, partial(text, length=128), 8, own_loss),
        Model("ViT", vit, pictures, 8, own_loss),
        Model("U-Net", UNet, noisy, 4, denoise, convolutional=True),
        Model("ResNet-18", partial(ResNet, (2, 2, 2, 2), 1), partial(images, pixels=64), 16, classify, True),
        Model("ResNet-50", partial(ResNet, (3, 4, 6, 3), 4), partial(images, pixels=64), 8, classify, True),
        Model("LSTM", Recurrent, partial(sequences, length=64), 16, classify),
        Model("BERT", bert, partial(padded, length=128), 8, own_loss),
        Model("Mixtral", mixtral, partial(text, length=128), 4, own_loss),
    )
}

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("plain"),
        Variant("bf16 autocast", precision="bf16-mixed"),
        Variant("accumulate 4", accumulate=4),
        Variant("checkpoint", reentrant=False),
        Variant("checkpoint, reentrant", reentrant=True),
        Variant("clip", clip=1.0),
        Variant("SGD", optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9)),
        Variant("AdamW foreach", optimizer=partial(torch.optim.AdamW, lr=1e-4, foreach=True)),
        Variant("AdamW for-loop", optimizer=partial(torch.optim.AdamW, lr=1e-4, foreach=False)),
        Variant("Adafactor", optimizer=partial(torch.optim.Adafactor, lr=1e-3)),
        Variant("frozen half", frozen=True),
    )
}
"""Every way to train a model; "plain" is AdamW as torch defaults it for the device."""
