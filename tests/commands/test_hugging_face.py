"""Configs of transformers become models on meta with a batch, and broken ones are named."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from autobalance import Plan  # noqa: E402
from autobalance.commands.hugging_face import load_hugging_face  # noqa: E402
from autobalance.commands.sources import add_model_options, load_source  # noqa: E402

Run = Callable[..., str]
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 100}
CONFIGS: dict[str, dict[str, Any]] = {
    "causal": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2, **SIZES},
    "class not said": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100},
    "encoder": {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **SIZES},
    "questions": {"model_type": "bert", "architectures": ["BertForQuestionAnswering"], **SIZES},
    "both": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0, **T5},
    "vision": {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, **SIZES},
    "speech": {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": 32,
        "max_source_positions": 50,
        "max_target_positions": 20,
        "vocab_size": 100,
        **{f"{part}_{what}": 1 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")},
        **{f"{token}_token_id": 0 for token in ("pad", "bos", "eos", "decoder_start")},
    },
    "sound": {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], **SIZES},
}
SHAPES = {
    "causal": {"input_ids": (3, 64), "labels": (3, 64)},
    "class not said": {"input_ids": (3, 512), "labels": (3, 512)},
    "encoder": {"input_ids": (3, 64), "labels": (3,)},
    "questions": {"input_ids": (3, 64), "start_positions": (3,), "end_positions": (3,)},
    "both": {"input_ids": (3, 512), "labels": (3, 512)},
    "vision": {"pixel_values": (3, 3, 32, 32), "labels": (3,)},
    "speech": {"input_features": (3, 80, 100), "labels": (3, 20)},
    "sound": {"input_values": (3, 32000), "labels": (3, 32)},
}


def folder(tmp_path: Path, content: dict[str, Any] | str) -> str:
    (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return f"hf:{tmp_path}"


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_kind_gets_its_class_and_a_batch(kind: str, tmp_path: Path) -> None:
    model, batch = load_hugging_face(folder(tmp_path, CONFIGS[kind]), dtype="bf16", batch=3)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert next(model.parameters()).dtype == torch.bfloat16
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == SHAPES[kind]
    expected = CONFIGS[kind].get("architectures", ["GPT2LMHeadModel"])
    assert [type(model).__name__] == expected
    assert torch.get_default_dtype() == torch.float32


def test_inference_has_no_labels_and_keeps_its_cache(tmp_path: Path) -> None:
    place = folder(tmp_path, CONFIGS["both"])
    model, batch = load_hugging_face(place, batch=2, sequence=7, training=False)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "input_ids": (2, 7),
        "decoder_input_ids": (2, 7),
    }
    assert model.config.use_cache
    assert not load_hugging_face(place)[0].config.use_cache


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_a_plan_is_made_from_a_config_alone(tmp_path: Path, run: Run) -> None:
    place = folder(tmp_path, CONFIGS["causal"])
    saved = tmp_path / "plan.json"
    run(
        "plan",
        place,
        "--devices",
        "2xA100-80GB",
        "--dtype",
        "bf16",
        "--batch",
        "2",
        "--sequence",
        "16",
        "-o",
        saved,
        "--micro-batches",
        1,
    )
    plan = Plan.load(saved)
    assert {"model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"} <= set(plan.block_names)
    assert plan.blocks[0].weights == 100 * 32 * 2 + 256  # in pieces of 512 bytes
    assert plan.fingerprint.endswith(
        "batch=input_ids=int64[2,16], labels=int64[2,16]; step=training; optimizer=AdamW; precision=bf16-true"
    )


@pytest.mark.parametrize(
    ("words", "precision", "dtype"),
    [
        ([], "bf16-true", torch.bfloat16),
        (["--dtype", "fp32"], "32-true", torch.float32),
        (["--precision", "bf16-mixed"], "bf16-mixed", torch.float32),
    ],
)
def test_weights_have_the_type_of_the_config_or_of_the_precision(
    words: list[str], precision: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    add_model_options(parser)
    options = parser.parse_args([folder(tmp_path, {**CONFIGS["causal"], "dtype": "bfloat16"}), *words])
    source = load_source(options, on_meta=True)
    assert source.precision == precision
    assert {parameter.dtype for parameter in source.model.parameters()} == {dtype}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "llama", ', r"config.json is not JSON \(.*fetch the file again"),
        ({"hidden_size": 8}, 'has no "model_type", which says what kind of model it is'),
        ({"model_type": "nonesuch"}, "cannot read the config in .* of model_type 'nonesuch'"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}}, "of model_type 'mine' .*custom code"),
        ({**CONFIGS["causal"], "hidden_size": "big"}, "Validation error for field 'hidden_size'.*Mend the config"),
        ({**CONFIGS["causal"], "architectures": ["LlamaForGo"]}, "is for the class 'LlamaForGo', which transformers"),
        ({**CONFIGS["causal"], "vocab_size": -1}, r"the config does not make a model \(RuntimeError: "),
    ],
)
def test_a_broken_config_is_named(content: dict[str, Any] | str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        load_hugging_face(folder(tmp_path, content))
    assert str(tmp_path) in str(raised.value)


def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"the directory holds no config\.json"):
        load_hugging_face(f"hf:{tmp_path}")
    with pytest.raises(ValueError, match=r"there is no directory \./nowhere"):
        load_hugging_face("hf:./nowhere")
    transformers = pytest.importorskip("transformers")
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path.parent)
        patch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("asked the network"))
        for name in ("nowhere/", "models/llama/7b", f"{tmp_path.name}/nowhere", f"{tmp_path}/nowhere"):
            with pytest.raises(ValueError, match=f"there is no directory {re.escape(name)}"):
                load_hugging_face(f"hf:{name}")
    place = folder(tmp_path, CONFIGS["causal"])
    with pytest.raises(ValueError, match="--sequence 65 is longer than the 64 tokens that the config allows"):
        load_hugging_face(place, sequence=65)
    with pytest.raises(ValueError, match="--dtype 'int8' is no data type of weights"):
        load_hugging_face(place, dtype="int8")

    def offline(name: str, **options: Any) -> None:
        raise OSError("We couldn't connect to the hub.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    with pytest.raises(ValueError, match=r"could not be fetched \(We couldn't connect .*Without a network give a dir"):
        load_hugging_face("hf:someone/model")
