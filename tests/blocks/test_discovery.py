"""Blocks found in models of many shapes; the expected names are what a person would place as one."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from autobalance.blocks import find_blocks


class Layer(nn.Module):
    """A transformer layer: parts beside an inner Sequential, used with residuals."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Decoder(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class ConvBnRelu(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 3), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(ConvBnRelu(inputs, outputs), nn.Conv2d(outputs, outputs, 3))
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.shortcut(x))


class Model(nn.Module):
    """A model of the parts it is given, in order."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


def names(model: nn.Module) -> list[str]:
    return list(find_blocks(model).names)


def test_layers_of_a_transformer_are_blocks_with_what_is_around_them() -> None:
    class Net(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 8)

    assert names(Net()) == ["embed", "layers.0", "layers.1", "norm", "head"]


def test_a_model_in_one_attribute_is_opened() -> None:
    class Net(pytorch_lightning.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net
            self.loss = nn.CrossEntropyLoss(weight=torch.ones(8))
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=8)
            self.metrics = torchmetrics.MetricCollection({"mean": torchmetrics.MeanMetric()})

    assert names(Net(Decoder())) == ["net.embed", "net.layers.0", "net.layers.1", "net.norm"]
    assert names(Net(nn.LSTM(4, 4, num_layers=2))) == ["net"]


def test_two_networks_alike_are_opened_both() -> None:
    both = Model(student=Decoder(), teacher=Decoder())
    parts = ("embed", "layers.0", "layers.1", "norm")
    assert names(both) == [f"{which}.{part}" for which in ("student", "teacher") for part in parts]


def test_layers_alike_without_a_list_are_whole() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layers(x)

    assert names(Model(first=Mlp(), second=Mlp())) == ["first", "second"]


def test_a_single_layer_in_a_list_is_whole() -> None:
    assert names(Decoder(depth=1)) == ["embed", "layers.0", "norm"]


def test_layers_in_a_dict_of_parts_are_found() -> None:
    parts = {
        "wte": nn.Embedding(8, 4),
        "drop": nn.Dropout(),
        "h": nn.ModuleList([Layer(), Layer()]),
        "f": nn.LayerNorm(4),
    }
    model = Model(transformer=nn.ModuleDict(parts), lm_head=nn.Linear(4, 8))
    assert names(model) == ["transformer.wte", "transformer.h.0", "transformer.h.1", "transformer.f", "lm_head"]


def test_attention_heads_in_a_list_do_not_split_a_layer() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.query = nn.Linear(4, 2), nn.Linear(4, 2)

    class ListLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([Head(), Head()])
            self.mlp = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(torch.cat([head(x) for head in self.heads], -1))

    model = Model(embed=nn.Embedding(8, 4), blocks=nn.Sequential(ListLayer(), ListLayer(), ListLayer()))
    assert names(model) == ["embed", "blocks.0", "blocks.1", "blocks.2"]


def test_stages_that_differ_are_opened_down_to_what_repeats_alike() -> None:
    class Stage(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Layer(width), Layer(width)])
            self.downsample = nn.Linear(width, 2 * width)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.downsample(x)

    model = Model(patches=nn.Conv2d(3, 4, 4), stages=nn.ModuleList([Stage(4), Stage(8)]))
    stages = [f"stages.{stage}.{part}" for stage in (0, 1) for part in ("blocks.0", "blocks.1", "downsample")]
    assert names(model) == ["patches", *stages]


def test_a_residual_network_gives_its_residual_blocks() -> None:
    model = Model(
        stem=ConvBnRelu(3, 4),
        layer1=nn.Sequential(Residual(4, 4), Residual(4, 4)),
        layer2=nn.Sequential(Residual(4, 8), Residual(8, 8)),
        pool=nn.AdaptiveAvgPool2d(1),
        classifier=nn.Linear(8, 10),
    )
    assert names(model) == ["stem", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "classifier"]


def test_a_residual_network_in_one_sequential_gives_them_too() -> None:
    stage = nn.Sequential(Residual(4, 8), Residual(8, 8))
    model = nn.Sequential(ConvBnRelu(3, 4), stage, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    assert names(model) == ["0", "1.0", "1.1+2+3", "4"]


def test_a_u_net_gives_its_ups_and_downs() -> None:
    class Double(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            first = (nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())
            second = (nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())
            self.double = nn.Sequential(*first, *second)

        def forward(self, x: Tensor) -> Tensor:
            return self.double(x)

    class Up(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(inputs, outputs, 2, 2)
            self.double = Double(inputs, outputs)

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return self.double(torch.cat([self.up(x), skip], 1))

    class ByAttributes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inc = Double(3, 4)
            self.down1 = nn.Sequential(nn.MaxPool2d(2), Double(4, 8))
            self.down2 = nn.Sequential(nn.MaxPool2d(2), Double(8, 16))
            self.up1, self.up2 = Up(16, 8), Up(8, 4)
            self.out = nn.Conv2d(4, 1, 1)

    class ByLists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.downs = nn.ModuleList([Double(3, 4), Double(4, 8)])
            self.pool = nn.MaxPool2d(2)
            self.middle = Double(8, 16)
            self.ups = nn.ModuleList([Up(16, 8), Up(8, 4)])

    assert names(ByAttributes()) == ["inc", "down1", "down2", "up1", "up2", "out"]
    assert names(Model(net=ByLists())) == ["net.downs.0", "net.downs.1", "net.middle", "net.ups.0", "net.ups.1"]


def test_an_encoder_and_a_decoder_are_opened() -> None:
    with pytest.warns(UserWarning, match="enable_nested_tensor"):
        transformer = nn.Transformer(4, 2, 2, 2, 8)
    assert names(Model(embed=nn.Embedding(8, 4), transformer=transformer, head=nn.Linear(4, 8))) == [
        "embed",
        *("transformer.encoder.layers.0", "transformer.encoder.layers.1", "transformer.encoder.norm"),
        *("transformer.decoder.layers.0", "transformer.decoder.layers.1", "transformer.decoder.norm"),
        "head",
    ]


@pytest.mark.parametrize(
    "whole",
    [
        nn.Linear(2, 2),
        nn.LSTM(2, 2),
        nn.MultiheadAttention(4, 2),
        nn.TransformerEncoderLayer(4, 2),
        nn.Bilinear(2, 2, 2),
    ],
    ids=lambda module: type(module).__name__,
)
def test_a_module_of_torch_is_never_split(whole: nn.Module) -> None:
    assert names(whole) == [""]
    assert names(Model(first=nn.Linear(2, 2), whole=whole)) == ["first", "whole"]


def test_parts_without_tensors_join_the_part_before_them_in_a_sequential() -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 4), nn.Tanh()
    )
    assert names(model) == ["0+1", "2+3+4", "5+6"]


def test_an_activation_used_twice_joins_nothing() -> None:
    activation = nn.ReLU()
    assert names(nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 4), activation)) == ["0", "2"]


def test_parts_without_tensors_outside_a_sequential_are_no_blocks() -> None:
    model = Model(
        first=nn.Linear(4, 4), act=nn.ReLU(), list=nn.ModuleList([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)])
    )
    assert names(model) == ["first", "list.0", "list.2"]


def test_an_autoencoder_of_two_sequentials_is_split_in_both() -> None:
    def two(a: int, b: int, c: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c))

    assert names(Model(encoder=two(8, 4, 2), decoder=two(2, 4, 8))) == [
        "encoder.0+encoder.1",
        "encoder.2",
        "decoder.0+decoder.1",
        "decoder.2",
    ]


def test_a_long_feature_extractor_is_split() -> None:
    features = nn.Sequential(*[part for _ in range(3) for part in (nn.Conv2d(3, 3, 3), nn.ReLU(), nn.MaxPool2d(2))])
    model = Model(features=features, classifier=nn.Linear(3, 2))
    assert names(model) == [f"features.{i}+features.{i + 1}+features.{i + 2}" for i in (0, 3, 6)] + ["classifier"]


def test_a_module_whose_weight_is_used_without_calling_it_is_left_out() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.project(x)

        def project(self, x: Tensor) -> Tensor:
            return F.linear(x, self.embed.weight)

    assert names(Tied()) == ["layers.0", "layers.1"]


def test_asking_for_the_device_of_a_weight_is_not_using_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens.to(self.embed.weight.device)).to(self.head.weight.dtype))

    assert names(Net()) == ["embed", "head"]


def test_a_module_that_works_with_the_weights_of_its_layers_is_one_block() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                x = F.linear(x, layer.mlp[0].weight) * index
            return x

    assert names(Model(first=nn.Linear(4, 4), mixed=Mixed())) == ["first", "mixed"]


def test_weights_read_in_training_step_count() -> None:
    class Net(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.head(self.body(batch)).sum() + self.head.weight.norm()

    assert names(Net()) == ["body"]


def test_a_shared_module_is_one_block_by_its_first_name() -> None:
    shared = nn.Linear(4, 4)
    assert names(Model(a=shared, b=nn.Linear(4, 4), c=shared)) == ["a", "b"]


def test_layers_that_share_a_part_are_tied() -> None:
    first, second, third = Layer(), Layer(), Layer()
    third.attention = first.attention
    blocks = find_blocks(Model(layers=nn.ModuleList([first, second, third])))
    assert blocks.names == ("layers.0", "layers.1", "layers.2")
    assert blocks.ties == ((0, 2),)


def test_a_namespace_that_is_never_called_is_opened() -> None:
    bag = nn.Module()
    bag.left, bag.right = nn.Linear(2, 2), nn.Linear(2, 2)
    assert names(Model(bag=bag, head=nn.Linear(2, 2))) == ["bag.left", "bag.right", "head"]


def test_parameters_of_an_opened_module_stay_outside() -> None:
    class Net(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.zeros(4))
            self.scales = nn.ParameterList([torch.ones(1)])

    assert names(Net()) == ["embed", "layers.0", "layers.1", "norm"]


def test_parametrized_and_scripted_modules_are_whole() -> None:
    normed = parametrizations.weight_norm(nn.Linear(4, 4))
    assert names(Model(first=nn.Linear(4, 4), normed=normed)) == ["first", "normed"]
    assert names(Model(normed=normed)) == ["normed"]


def test_lazy_modules_are_found_before_they_have_shapes() -> None:
    assert names(nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))) == ["0+1", "2"]


def test_a_model_on_meta_gives_the_same_blocks() -> None:
    with torch.device("meta"):
        model = Decoder()
    assert names(model) == names(Decoder())


def test_blocks_that_an_inner_model_declares_are_honoured() -> None:
    class Inner(Decoder):
        def self_balance(self) -> list[Any]:
            return [[self.embed, self.layers[0]], self.layers[1]]

    assert names(Model(net=Inner(), head=nn.Linear(4, 8))) == ["net.embed+net.layers.0", "net.layers.1", "head"]


def test_a_part_that_an_inner_model_declares_is_not_placed_twice() -> None:
    class Inner(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.shared, self.own = shared, nn.Linear(4, 4)

        def self_balance(self) -> list[nn.Module]:
            return [self.shared, self.own]

    shared = nn.Linear(4, 4)
    assert names(Model(shared=shared, inner=Inner(shared))) == ["shared", "inner.own"]


def test_a_part_of_a_block_that_is_called_from_outside_too_is_one_block_with_it() -> None:
    class Whole(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part, self.more = part, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.more(self.part(x))

    part = nn.Linear(4, 4)
    assert names(Model(part=part, between=nn.Linear(4, 4), whole=Whole(part))) == ["between", "part+whole"]
    part = nn.Linear(4, 4)
    assert names(Model(whole=Whole(part), between=nn.Linear(4, 4), again=part)) == ["whole+whole.part", "between"]


def test_blocks_do_not_overlap_in_a_model_that_has_everything() -> None:
    model = Model(
        net=Decoder(),
        stages=nn.Sequential(Residual(4, 8), Residual(8, 8)),
        mlp=nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
    )
    modules = [part for group in find_blocks(model).modules for module in group for part in module.modules()]
    assert len(modules) == len(set(modules))
    inside = {id(parameter) for module in modules for parameter in module.parameters()}
    assert inside == {id(parameter) for parameter in model.parameters()}


def test_a_model_with_nothing_to_place_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.only.weight)

    with pytest.raises(ValueError, match=r"found no block in Bare: .* Write a method `self_balance\(self\)` of Bare"):
        find_blocks(Bare())
