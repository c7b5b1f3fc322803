"""A batch that a model of transformers can run on, of zeros, from what its config says of sizes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Tokens of a text, where neither the user nor the config says fewer.
_TOKENS = 512
# Samples of sound: two seconds at the 16 kHz that speech models are trained on.
_SOUND = 32_000
# A head that gives one answer for all of its input.
_ONE_ANSWER = ("SequenceClassification", "ImageClassification", "AudioClassification", "VideoClassification")


def dummy_batch(
    model: nn.Module, samples: int, sequence: int | None, *, training: bool, dtype: torch.dtype
) -> dict[str, Tensor]:
    """A batch of zeros, by name of argument.

    Example:
        >>> dummy_batch(gpt2, 8, 512, training=True, dtype=torch.float32)["labels"].shape     # doctest: +SKIP
        torch.Size([8, 512])

    Args:
        model: of transformers.
        samples: how many.
        sequence: tokens, or samples of sound, of each; None: as the config allows, at most 512 tokens.
        training: whether to add the labels that the model's own loss needs.
        dtype: of pixels and sound.

    Raises:
        ValueError: what the model takes is not known.
    """
    import torch

    config: Any = model.config
    takes = set(inspect.signature(model.forward).parameters)
    main = getattr(model, "main_input_name", "input_ids")
    tokens = _tokens(config, sequence)

    def zeros(*shape: int, floating: bool = False) -> Tensor:
        return torch.zeros(samples, *shape, dtype=dtype if floating else torch.int64, device="cpu")

    made: dict[str, Tensor] = {}
    if main == "input_ids":
        made["input_ids"] = zeros(tokens)
    elif main == "pixel_values":
        made["pixel_values"] = zeros(*_pixels(config), floating=True)
    elif main == "input_features":
        made["input_features"] = zeros(*_spectrum(config), floating=True)
    elif main == "input_values":
        made["input_values"] = zeros(sequence or _SOUND, floating=True)
    else:
        raise ValueError(
            f"{type(model).__name__} takes {main!r}, for which no batch is known: give one in words, such as "
            f'--batch "{main}=float32[{samples},3,224,224]"'
        )
    if training and "labels" in takes:
        made["labels"] = _labels(type(model).__name__, made[main], tokens, zeros)
    elif getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        made["decoder_input_ids"] = zeros(tokens)
    if training and "start_positions" in takes:
        made["start_positions"], made["end_positions"] = zeros(), zeros()
    return made


def _labels(name: str, main: Tensor, tokens: int, zeros: Any) -> Tensor:
    if any(answer in name for answer in _ONE_ANSWER):
        label: Tensor = zeros()
        return label
    if "CTC" in name:
        # Fewer than the frames that are left of the sound, for which the loss is defined.
        text: Tensor = zeros(max(1, main.shape[-1] // 1000))
        return text
    per_token: Tensor = zeros(tokens)
    return per_token


def _tokens(config: Any, sequence: int | None) -> int:
    text = config.get_text_config(decoder=True)
    most = next(
        (
            size
            for name in ("max_target_positions", "max_position_embeddings", "n_positions")
            if isinstance(size := getattr(text, name, None), int) and size > 0
        ),
        None,
    )
    if sequence is not None:
        if most is not None and sequence > most:
            raise ValueError(f"--sequence {sequence} is longer than the {most} tokens that the config allows")
        return sequence
    return min(_TOKENS, most or _TOKENS)


def _pixels(config: Any) -> tuple[int, int, int]:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return int(getattr(vision, "num_channels", None) or 3), int(height), int(width)


def _spectrum(config: Any) -> tuple[int, int]:
    """Bands and frames; Whisper's encoder halves the frames to the positions it has."""
    return int(getattr(config, "num_mel_bins", None) or 80), 2 * int(getattr(config, "max_source_positions", 1500))
