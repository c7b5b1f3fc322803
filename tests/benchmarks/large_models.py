"""Twelve models at their real size, with batches of usual sizes: built on meta, they take no memory.

Those of transformers are built from configurations; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import ConvolutionBlock, ResNet, UNet, classify, images, own_loss

MODES = ("training", "inference")
"""With AdamW in bf16-mixed, and in bf16."""


@dataclass(frozen=True)
class Large:
    """A model at its real size.

    Attributes:
        name: in words.
        size: of a sample, in words.
        make: builds it.
        batch: a batch of a number of samples, on meta.
        step: `step(model, batch) -> loss`.
        answer: what it computes where it is not trained.
        layers: class names of the parts that repeat.
        samples: in the batch that is traced, which takes the same way through the step as two and three times as many.
    """

    name: str
    size: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    step: Callable[[nn.Module, Any], Tensor]
    answer: Callable[[nn.Module, Any], Any]
    layers: tuple[str, ...]
    samples: int = 1

    def build(self, mode: str) -> nn.Module:
        """The model on meta, as it is trained or used."""
        with torch.device("meta"):
            model = self.make()
        return model if mode == "training" else model.to(torch.bfloat16).eval()


class Vgg(nn.Module):
    """VGG16: Simonyan and Zisserman, "Very Deep Convolutional Networks", 2014, configuration D."""

    def __init__(self) -> None:
        super().__init__()
        channels, layers = 3, list[nn.Module]()
        for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(depth):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        head = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout()]
        head += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 1000)]
        self.layers = nn.Sequential(*layers, nn.Flatten(), *head)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


def _unet() -> nn.Module:
    """Widths of Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", 2015."""
    model = UNet((64, 128, 256, 512, 1024))
    # Attention to so few pixels is split among a number of kernels that depends on the batch, and so does its scratch.
    model.middle = nn.Sequential(ConvolutionBlock(1024, 1024), ConvolutionBlock(1024, 1024))
    return model


# --- models of transformers, of the sizes that their papers name


def _gpt2_xl() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25, use_cache=False))


def _llama(**sizes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=32000, max_position_embeddings=4096, use_cache=False, **sizes))


def bloom(layers: int = 70, use_cache: bool = False) -> nn.Module:
    """BigScience: "BLOOM: A 176B-Parameter Open-Access Multilingual Language Model", 2022, table 3."""
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(
        BloomConfig(vocab_size=250880, hidden_size=14336, n_layer=layers, n_head=112, use_cache=use_cache)
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128}
    return T5ForConditionalGeneration(T5Config(use_cache=False, decoder_start_token_id=0, **sizes))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    )


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes: dict[str, Any] = dict.fromkeys(("encoder_layers", "decoder_layers"), 32)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 20)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 5120)
    return WhisperForConditionalGeneration(WhisperConfig(d_model=1280, use_cache=False, **sizes))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(vocab_size=32000, max_position_embeddings=4096, use_cache=False))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=1280,
            num_hidden_layers=32,
            num_attention_heads=16,
            intermediate_size=5120,
            patch_size=14,
            num_labels=1000,
        )
    )


# --- batches, and what is asked of a model that is not trained


def _text(size: int, length: int) -> dict[str, Tensor]:
    ids = torch.ones(size, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def _translation(size: int, length: int, answer: int) -> dict[str, Tensor]:
    return {"input_ids": torch.ones(size, length, dtype=torch.long), "labels": torch.ones(size, answer).long()}


def _speech(size: int) -> dict[str, Tensor]:
    return {"input_features": torch.zeros(size, 80, 3000), "labels": torch.ones(size, 448, dtype=torch.long)}


def _pictures(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.zeros(size, 3, 224, 224), "labels": torch.ones(size, dtype=torch.long)}


def _noisy(size: int) -> dict[str, Tensor]:
    return {"x": torch.zeros(size, 3, 512, 512), "y": torch.zeros(size, 3, 512, 512)}


def _denoise(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def _own(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"])


def _logits(model: nn.Module, batch: Any) -> Any:
    """Without labels; a decoder beside an encoder is given its tokens by their name."""
    inputs, config = dict(batch), cast(Any, model.config)
    labels = inputs.pop("labels")
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = labels
    return model(**inputs).logits


def _language(name: str, length: int, make: Callable[[], nn.Module], *layers: str, samples: int = 1) -> Large:
    return Large(name, f"{length} tokens", make, partial(_text, length=length), own_loss, _logits, layers, samples)


_LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
_PIXELS = "224 x 224 pixels"
_IMAGE = partial(images, pixels=224)
_SENTENCES = partial(_translation, length=512, answer=114)  # lengths of T5's own pre-training

LARGE = {
    model.name: model
    for model in (
        Large("VGG16", _PIXELS, Vgg, _IMAGE, classify, _own, ()),
        Large("ResNet-152", _PIXELS, partial(ResNet, (3, 8, 36, 3), 4), _IMAGE, classify, _own, ("Residual",)),
        Large(
            "U-Net",
            "512 x 512 pixels",
            _unet,
            _noisy,
            _denoise,
            _own,
            ("ConvolutionBlock",),
        ),
        _language("BERT-large", 512, _bert, "BertLayer"),
        Large("ViT-H", _PIXELS, _vit, _pictures, own_loss, _logits, ("ViTLayer",)),
        # Above 3072 tokens the gradient of an embedding is summed up by another kernel.
        _language("GPT-2 XL", 1024, _gpt2_xl, "GPT2Block", samples=4),
        Large(
            "Whisper-large",
            "30 s of sound, 448 tokens",
            _whisper,
            _speech,
            own_loss,
            _logits,
            ("WhisperEncoderLayer", "WhisperDecoderLayer"),
        ),
        _language("Llama-7B", 2048, _llama, "LlamaDecoderLayer"),
        Large("T5-11B", "512 tokens, 114 tokens", _t5, _SENTENCES, own_loss, _logits, ("T5Block",)),
        _language("Mixtral-8x7B", 4096, _mixtral, "MixtralDecoderLayer"),
        _language("Llama-70B", 4096, partial(_llama, **_LLAMA_70B), "LlamaDecoderLayer"),
        _language("BLOOM-176B", 2048, bloom, "BloomBlock"),
    )
}
"""By name, the smallest first."""
