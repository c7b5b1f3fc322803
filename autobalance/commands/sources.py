"""What a command is about: a profile file, a factory or a transformers model, made into a profile."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import autobalance
from autobalance.commands.batch_words import batch_from_words, is_batch_in_words
from autobalance.commands.factories import call_factory, call_named, find_function, named
from autobalance.commands.hugging_face import PREFIX, load_hugging_face
from autobalance.devices.table import find_gpu
from autobalance.devices.words import parse_devices

if TYPE_CHECKING:
    from torch import nn

    from autobalance.profiling.profile import Profile

SOURCE_HELP = (
    "a file that `autobalance profile -o` or `Profile.save` wrote; FILE.py:FUNCTION or MODULE:FUNCTION, which returns "
    "a model or (model, batch); or hf:DIRECTORY_OR_NAME of a transformers model, of which only the config is read"
)
# The weights' own type, in words of the Trainer.
_PRECISIONS = {"torch.bfloat16": "bf16-true", "torch.float16": "16-true"}


@dataclass
class Source:
    """A model and what is to be profiled of it.

    Attributes:
        model: on meta where its factory can be called there.
        batch: on the host.
        step: of a LightningModule, its training_step; None: the model is called.
        optimizer: class or function of parameters; None: none.
        precision: as the Trainer has it.
        notes: what there is to say about how the model was made.
    """

    model: nn.Module
    batch: Any
    step: Callable[..., Any] | None
    optimizer: Callable[..., Any] | None
    precision: str
    notes: list[str] = field(default_factory=list)

    def profiled(self, options: argparse.Namespace, **keywords: Any) -> Profile:
        """The profile of what is here.

        Example:
            >>> load_source(options, on_meta=True).profiled(options, target=options.target, scalable=True)

        Args:
            options: as for `load_source`.
            **keywords: of `autobalance.profile`.
        """
        return autobalance.profile(
            self.model,
            self.batch,
            optimizer=self.optimizer,
            precision=self.precision,
            step=self.step,
            training=not options.inference,
            **keywords,
        )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Let a command be told how a model is trained.

    Example:
        >>> add_model_options(parser)

    Args:
        parser: of the command.
    """
    parser.add_argument(
        "--batch",
        help='samples, "8"; shapes, "input_ids=int64[8,128]"; or a function that returns a batch, FILE.py:FUNCTION',
    )
    parser.add_argument("--sequence", type=int, help="of a transformers model: tokens, or samples of sound, of each")
    parser.add_argument("--dtype", help="of the weights of a transformers model: fp32, bf16 or fp16")
    parser.add_argument(
        "--optimizer",
        help="class in torch.optim, or none (default: the LightningModule's own, else AdamW; none of inference)",
    )
    parser.add_argument("--precision", help="as the Trainer has it (default: 32-true, or that of --dtype)")
    parser.add_argument("--inference", action="store_true", help="a forward pass without gradients")
    parser.add_argument(
        "--target",
        help='whose kernels: "A100-80GB", "cuda", "cpu", "simulated" (default: the devices planned for, the GPU here, '
        "else an A100)",
    )


def profile_of(options: argparse.Namespace, *, scalable: bool, devices: str | None) -> Profile:
    """The profile that a command is about: read, or made without memory for the model.

    Example:
        >>> profile_of(parser.parse_args(["plan", "hf:./llama-7b", "4x80GiB"]), scalable=True, devices="4x80GiB")

    Args:
        options: of a command that `add_model_options` was called for, with the source in `source`.
        scalable: whether the bytes of other batch sizes are wanted.
        devices: in words; a GPU's name among them says whose kernels are counted.

    Raises:
        ValueError: options that do not go together, or a source that is none.
        OSError, ImportError, TypeError: as the source has it.
    """
    if is_profile_file(options.source):
        _refuse_for_file(options)
        return autobalance.Profile.load(options.source)
    source = load_source(options, on_meta=True)
    for note in source.notes:
        print(f"note: {note}", file=sys.stderr)
    return source.profiled(options, target=options.target or _gpu_of(devices), scalable=scalable)


def load_source(options: argparse.Namespace, *, on_meta: bool) -> Source:
    """The model of a factory or of transformers, with its batch.

    Example:
        >>> load_source(parser.parse_args(["profile", "net.py:make"]), on_meta=True).model     # doctest: +SKIP

    Args:
        options: of a command that `add_model_options` was called for, with the source in `source`.
        on_meta: build the model without memory, where that can be.

    Raises:
        ValueError: options that do not go together, or a source that is none.
        ImportError, TypeError: as the source has it.
    """
    notes: list[str] = []
    own_precision = "32-true"
    if options.source.startswith(PREFIX):
        model, batch = _from_hugging_face(options)
        own_precision = _PRECISIONS.get(str(next(model.parameters()).dtype), "32-true")
    else:
        for name in ("dtype", "sequence"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name} is about a transformers model, hf:NAME; {options.source!r} says it itself")
        model, batch, notes = call_factory(options.source, on_meta=on_meta)
        batch = _batch(options.batch, batch, options.source)
    is_lightning = callable(getattr(model, "training_step", None)) and hasattr(model, "configure_optimizers")
    return Source(
        model,
        batch,
        _training_step if is_lightning and not options.inference else None,
        _optimizer(options, model if is_lightning else None),
        options.precision or own_precision,
        notes,
    )


def is_profile_file(source: str) -> bool:
    """Whether a command is about a profile that is made already.

    Example:
        >>> is_profile_file("profile.json"), is_profile_file("net.py:make")
        (True, False)

    Args:
        source: as the command was told.
    """
    if source.startswith(PREFIX) or source.endswith(".py"):
        return False
    return Path(source).is_file() or ":" not in source


def _refuse_for_file(options: argparse.Namespace) -> None:
    given = [
        name for name in ("batch", "sequence", "dtype", "optimizer", "precision", "target") if options.__dict__[name]
    ]
    if options.inference:
        given.append("inference")
    if given:
        raise ValueError(
            f"--{given[0]} says how a model is profiled, but {options.source} is taken for a profile that is made "
            f"already; profile the model again with it, or give FILE.py:FUNCTION or hf:NAME"
        )


def _from_hugging_face(options: argparse.Namespace) -> tuple[nn.Module, Any]:
    words = options.batch or "1"
    samples = int(words) if words.isdecimal() else 1
    dtype = options.dtype
    if dtype is None and (options.precision or "").endswith(("-mixed", "32-true")):
        dtype = "fp32"  # which is what these precisions are about
    model, batch = load_hugging_face(
        options.source,
        dtype=dtype,
        batch=samples,
        sequence=options.sequence,
        training=not options.inference,
    )
    return model, batch if words.isdecimal() else _batch(words, None, options.source)


def _batch(words: str | None, made: Any, place: str) -> Any:
    """The batch that `--batch` asks for, from the factory's own where it gives a number of samples."""
    if words is None:
        if made is None:
            raise ValueError(
                f'{place} returned no batch: have it return (model, batch), or say --batch "x=float32[8,64]", the '
                f"shapes that the model is called with, or --batch FILE.py:FUNCTION"
            )
        return made
    if is_batch_in_words(words):
        return batch_from_words(words)
    if words.isdecimal():
        if made is None:
            raise ValueError(
                f"--batch {words} resizes the batch that {place} returns, but it returns none: say shapes, such as "
                f'--batch "x=float32[{words},64]"'
            )
        from autobalance.profiling.batches import with_samples

        return with_samples(made, int(words))
    return call_named(words, find_function(words))


def _optimizer(options: argparse.Namespace, module: Any) -> Callable[..., Any] | None:
    if options.inference or (options.optimizer or "").lower() == "none":
        return None
    from torch import optim

    if options.optimizer is not None:
        found: Callable[..., Any] = named(optim, options.optimizer)
        return found
    return optim.AdamW if module is None else _own_optimizer(module)


def _own_optimizer(module: Any) -> Callable[..., Any]:
    """A function that makes on other parameters what a LightningModule makes on its own."""
    from torch import optim

    made = module.configure_optimizers()
    while isinstance(made, (dict, list, tuple)) and made:  # of several, or with a scheduler
        made = made.get("optimizer") if isinstance(made, dict) else made[0]
    if not isinstance(made, optim.Optimizer):
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers() returned {type(made).__name__}, in which no optimizer was "
            f"found: name one, such as --optimizer AdamW"
        )
    kind, asked = type(made), inspect.signature(type(made)).parameters
    # AdamW's defaults hold an entry of Adam's that it does not take.
    defaults = {name: value for name, value in made.defaults.items() if name in asked}
    return lambda parameters: kind(parameters, **defaults)


def _training_step(module: Any, batch: Any) -> Any:
    """The loss of a LightningModule's own step."""
    made = module.training_step(batch, 0)
    return made["loss"] if isinstance(made, dict) else made


def _gpu_of(devices: str | None) -> str | None:
    """The GPU whose kernels count: the first of the devices planned for, where the table knows it."""
    if devices is None:
        return None
    gpu = find_gpu(parse_devices(devices)[0].name)
    return None if gpu is None else gpu.name
