"""A transformers model from its config alone: built on meta, with a batch that it can run on."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autobalance.commands.dummy_batch import dummy_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

PREFIX = "hf:"
# Where a config does not say which class it is for: heads that can be trained first, then the bare model.
_AUTO = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCTC",
    "AutoModelForImageClassification",
    "AutoModel",
)
# Letters of transformers' own message that are told; some go on for pages.
_MOST_WORDS = 300
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def load_hugging_face(
    place: str, *, dtype: str | None = None, batch: int = 1, sequence: int | None = None, training: bool = True
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model of transformers on meta, and a batch for it.

    Example:
        >>> model, batch = load_hugging_face("hf:llama-7b", dtype="bf16", batch=8, sequence=512)     # doctest: +SKIP

    Args:
        place: "hf:" and a directory with a config.json, or a name on the hub.
        dtype: of the weights, such as "bf16"; None: as the config says.
        batch: samples.
        sequence: tokens, or samples of sound, of each; None: as the config allows, at most 512 tokens.
        training: whether labels are wanted, and no cache of keys and values.

    Returns:
        The model without values; the batch, by name of argument.

    Raises:
        ImportError: transformers is missing.
        ValueError: the config is missing, broken or of an unknown kind; the text says what to do.
    """
    name = place[len(PREFIX) :]
    config = load_config(name)
    wanted = _dtype(dtype, config)
    if training and getattr(config, "use_cache", None):
        config.use_cache = False
    with _built(wanted):
        model = _model(config, name)
    model.to("meta").train(training)  # some classes make a tensor of their own on the host
    return model, dummy_batch(model, batch, sequence, training=training, dtype=wanted)


def load_config(name: str) -> Any:
    """The config of a model of transformers.

    Example:
        >>> load_config("./llama-7b").hidden_size       # doctest: +SKIP
        4096

    Args:
        name: a directory with a config.json, or a name on the hub.

    Raises:
        ImportError: transformers is missing.
        ValueError: the config is missing, broken or of an unknown kind; the text says what to do.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"hf: needs transformers ({error}): pip install transformers") from error
    folder = Path(name)
    path = folder / "config.json"
    if folder.is_dir():
        _check_file(path)
    elif _is_path(name):
        raise ValueError(f"hf:{name}: there is no directory {name}; it is to hold the config.json of the model")
    try:
        return _fetched(transformers.AutoConfig, name)
    except OSError as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"hf:{name}: no directory of this name is here, and its config.json could not be fetched ({reason}). "
            f"Without a network give a directory that holds the model's config.json; weights are not needed."
        ) from error
    except Exception as error:  # whatever a config's own checks raise: it is the file that is wrong
        known = json.loads(path.read_text()).get("model_type") if path.is_file() else None
        reason = " ".join(str(error).split())[:_MOST_WORDS]
        raise ValueError(
            f"hf:{name}: transformers {transformers.__version__} cannot read the config"
            f"{f' in {path}' if path.is_file() else ''}{f' of model_type {known!r}' if known else ''} "
            f"({type(error).__name__}: {reason}). Mend the config, update transformers, or give a function that builds "
            f"the model, FILE.py:FUNCTION."
        ) from error


def _fetched(auto: Any, name: str) -> Any:
    """A config from this machine where it is here, so that nobody waits for a network that is not.

    Code that comes with a config is not run, and nobody is asked whether it should be.
    """
    try:
        return auto.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except OSError:
        if Path(name).is_dir():
            raise
        return auto.from_pretrained(name, trust_remote_code=False)


def _is_path(name: str) -> bool:
    """Whether a name can only be that of a directory: names on the hub are MODEL or OWNER/MODEL."""
    folder = Path(name)
    is_odd = name.startswith((".", "~")) or name.endswith(("/", "\\")) or len(folder.parts) > 2
    return folder.is_absolute() or is_odd or (len(folder.parts) == 2 and folder.parent.is_dir())


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"hf:{path.parent}: the directory holds no config.json; save it with config.save_pretrained")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"hf:{path.parent}: {path} is not JSON ({error}); fetch the file again") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError(
            f'hf:{path.parent}: {path} has no "model_type", which says what kind of model it is; add it, such as '
            f'"model_type": "llama"'
        )


def _model(config: Any, name: str) -> nn.Module:
    import transformers

    declared = (getattr(config, "architectures", None) or [None])[0]
    if declared is not None:
        cls = getattr(transformers, declared, None)
        if cls is None:
            raise ValueError(
                f"hf:{name}: its config is for the class {declared!r}, which transformers {transformers.__version__} "
                f'lacks: update transformers, or take "architectures" out of the config to have a class chosen'
            )
        return _made(cls, config, name)
    for auto in _AUTO:
        try:
            return _made(getattr(transformers, auto).from_config, config, name)
        except _NotOfThisKind:
            continue
    raise ValueError(
        f"hf:{name}: transformers {transformers.__version__} has no model for a config of model_type "
        f"{config.model_type!r}; give a function that builds the model, FILE.py:FUNCTION"
    )


class _NotOfThisKind(Exception):
    """An Auto class has nothing for a config."""


def _made(make: Any, config: Any, name: str) -> nn.Module:
    try:
        model: nn.Module = make(config)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        if reason.startswith("Unrecognized configuration class"):
            raise _NotOfThisKind from error
        raise ValueError(
            f"hf:{name}: the config does not make a model ({type(error).__name__}: {reason}). Its numbers contradict "
            f"each other, or one is missing: compare it with the config of a model of type {config.model_type!r}"
        ) from error
    return model


def _dtype(word: str | None, config: Any) -> torch.dtype:
    import torch

    found = getattr(config, "dtype", None) if word is None else getattr(torch, _DTYPES.get(word, word), None)
    if isinstance(found, str):
        found = getattr(torch, found, None)
    if word is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"--dtype {word!r} is no data type of weights; write fp32, bf16 or fp16")
    return found if isinstance(found, torch.dtype) else torch.float32


@contextmanager
def _built(dtype: torch.dtype) -> Iterator[None]:
    """Inside, modules are built on meta in `dtype`, as loading a checkpoint builds them."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)
