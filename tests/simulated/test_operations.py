"""Operations give the CPU's numbers, forward and backward, and stay on their device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Function = Callable[..., Any]
randn = torch.randn
torch.manual_seed(0)  # the operands below are the same in every run


def change_views(x: Tensor) -> Tensor:
    y = x * 2
    y[0] *= 3
    y[:, 1].add_(x[:, 0])
    y.view(-1)[2] = 5.0
    y.t()[1:3].copy_(x.t()[:2] * y.detach().t()[:2].clone())
    return y


FUNCTIONS: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "layer norm": (lambda x, w: F.layer_norm(x, (8,), w), (randn(4, 8), randn(8))),
    "rms norm": (lambda x, w: F.rms_norm(x, (8,), w), (randn(4, 8), randn(8))),
    "group norm": (lambda x: F.group_norm(x, 2), (randn(2, 4, 3),)),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), (randn(2, 3, 9), randn(4, 3, 3))),
    "grouped conv2d": (lambda x, w: F.conv2d(x, w, groups=2), (randn(2, 4, 6, 6), randn(4, 2, 3, 3))),
    "conv3d": (F.conv3d, (randn(1, 2, 4, 4, 4), randn(3, 2, 2, 2, 2))),
    "transposed convolution": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (randn(2, 3, 4, 4), randn(3, 2, 2, 2))),
    "pooling": (lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2) + F.adaptive_avg_pool2d(x, 3), (randn(2, 3, 6, 6),)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (randn(1, 2, 4, 4),)),
    "nearest": (lambda x: F.interpolate(x, size=(7, 5)), (randn(1, 2, 4, 4),)),
    "pad": (lambda x: F.pad(x, (1, 2), mode="reflect"), (randn(2, 3, 5),)),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (randn(2, 2, 5, 8),) * 3),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (randn(2, 2, 5, 8), randn(2, 2, 5, 8), randn(2, 2, 5, 8)),
    ),
    "attention with bias": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (randn(2, 2, 5, 8), randn(2, 2, 6, 8), randn(2, 2, 6, 8), randn(5, 6)),
    ),
    "grouped-query attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (randn(2, 4, 5, 8), randn(2, 2, 5, 8), randn(2, 2, 5, 8)),
    ),
    "cross entropy": (
        lambda x: F.cross_entropy(x, torch.arange(4, device=x.device), label_smoothing=0.1),
        (randn(4, 6),),
    ),
    "binary cross entropy": (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x), pos_weight=x.new_ones(3)),
        (randn(4, 3),),
    ),
    "losses": (lambda x, y: F.smooth_l1_loss(x, y) + F.mse_loss(x, y) + F.huber_loss(x, y), (randn(4), randn(4))),
    "kl and cosine": (
        lambda x, y: F.kl_div(x, y.softmax(1), reduction="sum") + F.cosine_similarity(x, y).sum(),
        (randn(3, 4),) * 2,
    ),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), (randn(2, 3, 4), randn(2, 4, 5))),
    "matmuls": (lambda x, y: torch.baddbmm(x @ y, x, y) + torch.bmm(x, y), (randn(2, 3, 4), randn(2, 4, 3))),
    "cumulative": (lambda x: x.cumsum(0) + x.cumprod(1) + x.logcumsumexp(0), (randn(3, 4),)),
    "sort": (lambda x: x.sort(1)[0] * x.topk(4)[0], (randn(3, 4),)),
    "reductions": (
        lambda x: x.amax(0) + x.std(0) + x.var(0) + x.logsumexp(0) + x.norm(dim=0) + x.prod(0),
        (randn(3, 4),),
    ),
    "median and mode": (lambda x: x.median() + x.kthvalue(2, 0)[0].sum() + x.max(0)[0], (randn(3, 4),)),
    "gather": (lambda x: x.gather(1, torch.tensor([[0, 2], [1, 1]], device=x.device)), (randn(2, 4),)),
    "scatter": (
        lambda x: torch.zeros(2, 4, device=x.device).scatter_add(1, torch.tensor([[0, 2], [1, 1]], device=x.device), x),
        (randn(2, 2),),
    ),
    "index put": (
        lambda x: x.clone().index_put_((torch.tensor([0, 2], device=x.device),), x[0:2], accumulate=True),
        (randn(3, 4),),
    ),
    "index with host index": (lambda x: x[torch.tensor([2, 0])], (randn(3, 4),)),
    "index add": (lambda x: x.index_add(0, torch.tensor([0, 0], device=x.device), x[:2]), (randn(3, 4),)),
    "mask": (lambda x: x[x > 0].sum() + x.masked_fill(x < 0, 2.0), (randn(3, 4),)),
    "masked scatter": (lambda x, y: x.masked_scatter(x > 0, y), (randn(3, 4), randn(3, 4))),
    "where": (lambda x, y: torch.where(x > 0, x, y) + torch.where(x > 0, x, 1.0), (randn(3, 4), randn(3, 4))),
    "cat, stack, split": (
        lambda x, y: torch.cat([torch.stack([x, y]).flatten(), *x.split(1)[0], y.chunk(2)[0].flatten()]),
        (randn(4, 3), randn(4, 3)),
    ),
    "shapes": (lambda x: x.permute(1, 0)[:, None].expand(4, 2, 3).reshape(-1).unfold(0, 3, 2).roll(1), (randn(3, 4),)),
    "strides": (
        lambda x: x.as_strided((2, 2), (1, 2)) + x.diagonal()[:2] + x.tril()[:2, :2] + x.flip(0)[:2, :2],
        (randn(3, 4),),
    ),
    "repeat": (lambda x: x.repeat(2, 1) + x.repeat_interleave(2, 0) + x.tile(2, 1), (randn(3, 4),)),
    "fourier": (lambda x: torch.fft.irfft(torch.fft.rfft(x)).abs(), (randn(3, 8),)),
    "complex": (lambda x: torch.view_as_real(torch.polar(x.abs(), x) * 1j), (randn(3, 4),)),
    "linear algebra": (
        lambda x: torch.linalg.inv(x @ x.T + 3 * torch.eye(3, device=x.device)) + torch.linalg.vector_norm(x),
        (randn(3, 3),),
    ),
    "activations": (
        lambda x: F.gelu(x) + F.silu(x) + F.elu(x) + F.softplus(x) + F.hardswish(x) + F.glu(x).sum(),
        (randn(3, 4),),
    ),
    "softmax": (lambda x: x.softmax(-1) + F.log_softmax(x, 0) + F.softmin(x, 1) + F.gumbel_softmax(x), (randn(3, 4),)),
    "dropout": (
        lambda x: F.dropout(x, 0.4) + F.dropout2d(x[None, None], 0.4)[0, 0] + F.alpha_dropout(x, 0.2),
        (randn(3, 4),),
    ),
    "random": (
        lambda x: (
            x
            + torch.randn_like(x)
            + torch.rand(4, device=x.device)
            + torch.bernoulli(x.sigmoid())
            + torch.randn(4, device=x.device)
        ),
        (randn(3, 4),),
    ),
    "random integers": (
        lambda x: (
            x * torch.randint(3, (4,), device=x.device)
            + torch.randperm(4, device=x.device)
            + x.detach().clone().random_(5)
        ),
        (randn(3, 4),),
    ),
    "multinomial": (lambda x: x[torch.multinomial(torch.ones(3, device=x.device), 2)], (randn(3, 4),)),
    "initialisers": (
        lambda x: (
            nn.init.kaiming_uniform_(torch.empty_like(x))
            + nn.init.orthogonal_(torch.empty_like(x))
            + nn.init.trunc_normal_(torch.empty_like(x)) * x
        ),
        (randn(3, 4),),
    ),
    "in place": (lambda x: x.clone().mul_(2).add_(x).clamp_(-1, 1).sub_(1).div_(3), (randn(3, 4),)),
    "in place on views": (change_views, (randn(3, 4),)),
    "out": (lambda x: torch.add(x.detach(), 1, out=torch.empty(0, device=x.device)) + x, (randn(3, 4),)),
    "types": (lambda x: x.double().to(torch.float32) + x.bfloat16().float() + x.long() + x.bool(), (randn(3, 4),)),
    "bucketize": (
        lambda x: x + torch.bucketize(x.detach(), torch.tensor([-1.0, 0.0, 1.0], device=x.device)),
        (randn(3, 4),),
    ),
    "unique": (lambda x: x * x.detach().round().unique()[:2].sum(), (randn(3, 4),)),
    "one hot": (lambda x: F.one_hot(torch.arange(3, device=x.device)).float() @ x, (randn(3, 4),)),
    "embedding bag": (
        lambda w: F.embedding_bag(torch.tensor([[0, 2], [1, 1]], device=w.device), w, mode="mean"),
        (randn(3, 4),),
    ),
    "grid sample": (
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
        (randn(1, 2, 4, 4), randn(1, 3, 3, 2)),
    ),
    "ctc": (
        lambda x: F.ctc_loss(
            x.log_softmax(2), torch.tensor([[1, 2]], device=x.device), *torch.tensor([[5], [2]], device=x.device)
        ),
        (randn(5, 1, 4),),
    ),
    "meshgrid": (lambda x: sum(torch.meshgrid(x, x, indexing="ij")), (randn(4),)),
    "scalar on the host": (lambda x: x * torch.tensor(2.0) + torch.tensor(1.0), (randn(3, 4),)),
}


def run(function: Function, arguments: tuple[Tensor, ...], device: str) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    moved = [argument.clone().to(device).requires_grad_() for argument in arguments]
    results = function(*moved)
    results = [results] if isinstance(results, Tensor) else list(results)
    gradients = torch.autograd.grad([r.sum() for r in results], moved, allow_unused=True)
    return results, [gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_result_and_gradients_equal_the_cpus(name: str) -> None:
    function, arguments = FUNCTIONS[name]
    expected, expected_gradients = run(function, arguments, "cpu")
    results, gradients = run(function, arguments, "simulated:2")
    assert len(gradients) == len(expected_gradients) > 0
    for one, other in zip([*results, *gradients], [*expected, *expected_gradients], strict=True):
        assert one.device == torch.device("simulated:2")
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=2e-6)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "lstm": (lambda: nn.LSTM(4, 5), (randn(3, 2, 4),)),
    "lstm with state": (lambda: nn.LSTM(4, 5, batch_first=True), (randn(3, 2, 4), (randn(1, 3, 5), randn(1, 3, 5)))),
    "deep bidirectional lstm": (lambda: nn.LSTM(4, 5, 2, bidirectional=True, dropout=0.0), (randn(3, 2, 4),)),
    "projected lstm": (lambda: nn.LSTM(4, 5, proj_size=3), (randn(3, 2, 4),)),
    "lstm without bias": (lambda: nn.LSTM(4, 5, bias=False), (randn(3, 2, 4),)),
    "gru": (lambda: nn.GRU(4, 5), (randn(3, 2, 4), randn(1, 2, 5))),
    "deep bidirectional gru": (lambda: nn.GRU(4, 5, 2, bidirectional=True), (randn(3, 2, 4),)),
    "gru without bias": (lambda: nn.GRU(4, 5, bias=False), (randn(3, 2, 4),)),
    "rnn": (lambda: nn.RNN(4, 5), (randn(3, 2, 4),)),
    "lstm cell": (lambda: nn.LSTMCell(4, 5), (randn(3, 4),)),
    "gru cell": (lambda: nn.GRUCell(4, 5), (randn(3, 4),)),
    "batch norm": (lambda: nn.BatchNorm1d(4), (randn(6, 4),)),
    "batch norm, evaluating": (lambda: nn.BatchNorm2d(4).eval(), (randn(2, 4, 3, 3),)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), (randn(2, 4, 3),)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (randn(2, 3, 8),)),
    "decoder": (lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0), (randn(3, 2, 8), randn(4, 2, 8))),
    "attention with weights": (lambda: nn.MultiheadAttention(8, 2), (randn(3, 2, 8),) * 3),
    "embedding": (lambda: nn.Embedding(5, 4, padding_idx=1), (torch.tensor([[0, 1], [4, 2]]),)),
    "renormed embedding": (lambda: nn.Embedding(5, 4, max_norm=0.5), (torch.tensor([[0, 1], [4, 2]]),)),
    "bilinear": (lambda: nn.Bilinear(3, 4, 2), (randn(2, 3), randn(2, 4))),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (randn(2, 4),)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), (randn(2, 4),)),
}


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value or () for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def moved_to(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else tuple(moved_to(item, device) for item in value)


def run_module(make: Callable[[], nn.Module], arguments: tuple[Any, ...], device: str) -> list[Tensor]:
    torch.manual_seed(1)
    module = make().to(device)
    outputs = tensors_in(module(*moved_to(arguments, device)))
    sum((output.square().sum() for output in outputs), outputs[0].new_zeros(())).backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    assert gradients.count(None) == 0 or isinstance(module, nn.modules.batchnorm._NormBase)
    return [*outputs, *gradients, *module.buffers()]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # the CPU says so
@pytest.mark.parametrize("name", MODULES)
def test_module_and_its_gradients_equal_the_cpus(name: str) -> None:
    make, arguments = MODULES[name]
    expected = run_module(make, arguments, "cpu")
    results = run_module(make, arguments, "simulated:1")
    for one, other in zip(results, expected, strict=True):
        assert one.device == torch.device("simulated:1")
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=5e-6)


def test_fast_path_of_an_encoder() -> None:
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), randn(2, 3, 8)
    with torch.no_grad():
        expected = layer(x)
        result = layer.to("simulated:1")(x.to("simulated:1"))
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-6)


def test_to_meta_and_back() -> None:
    x = torch.ones(2, device="simulated:1").to("meta")
    assert (x.device.type, torch.empty_like(x, device="simulated:2").device.index) == ("meta", 2)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequence(kind: type[nn.RNNBase]) -> None:
    def last(device: str) -> Tensor:
        torch.manual_seed(1)
        rnn = kind(4, 5).to(device)
        packed = nn.utils.rnn.pack_padded_sequence(randn(4, 3, 4).to(device), [4, 2, 3], enforce_sorted=False)
        output, _ = nn.utils.rnn.pad_packed_sequence(rnn(packed)[0])
        output.sum().backward()
        return torch.cat([output.flatten(), *(parameter.grad.flatten() for parameter in rnn.parameters())])

    torch.testing.assert_close(last("simulated:3").cpu(), last("cpu"), rtol=1e-5, atol=1e-6)


MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": torch.add,
    "matmul": torch.matmul,
    "in place": lambda x, y: x.add_(y),
    "cat": lambda x, y: torch.cat([x, y]),
    "linear": F.linear,
    "convolution": lambda x, y: F.conv1d(x[None], y[None]),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "index": lambda x, y: x[y.abs().long() * 0],
    "embedding": lambda x, y: F.embedding(x.abs().long() * 0, y),
    "loss": F.mse_loss,
    "foreach": lambda x, y: torch._foreach_add([x], [y]),
    "out": lambda x, y: torch.add(x, 1, out=y),
}


@pytest.mark.parametrize("other", ["simulated:1", "cpu"])
@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices_are_refused_with_cudas_words(name: str, other: str) -> None:
    x, y = torch.ones(3, 3, device="simulated:0"), torch.ones(3, 3, device=other)
    if name == "index" and other == "cpu":
        assert MIXED[name](x, y).shape == (3, 3, 3)  # indices may be on the host, as on CUDA
        return
    words = "Expected all tensors to be on the same device, but found at least two devices, simulated:[01] and "
    with pytest.raises(RuntimeError, match=words):
        MIXED[name](x, y)


def test_sparse_gradients_are_refused_before_the_backward() -> None:
    layer = nn.Embedding(5, 4, sparse=True).to("simulated:1")
    tokens = torch.tensor([1, 2], device="simulated:1")
    with pytest.raises(RuntimeError, match="build the embedding with sparse=False"):
        layer(tokens)
    with torch.no_grad():
        assert layer(tokens).shape == (2, 4)


def test_scalars_of_the_host_are_allowed_but_not_of_another_device() -> None:
    x = torch.ones(3, device="simulated:0")
    assert (x + torch.tensor(2.0)).tolist() == [3.0, 3.0, 3.0]
    with pytest.raises(RuntimeError, match="simulated:0 and simulated:1"):
        x + torch.tensor(2.0, device="simulated:1")


def test_lists_of_several_devices_work_element_by_element() -> None:
    tensors = [torch.full((2,), float(index), device=f"simulated:{index}") for index in range(3)]
    doubled = torch._foreach_mul(tensors, 2.0)
    assert [str(tensor.device) for tensor in doubled] == ["simulated:0", "simulated:1", "simulated:2"]
    assert [tensor.tolist() for tensor in doubled] == [[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]


def test_copies_between_devices_keep_the_gradient_at_home() -> None:
    x = torch.ones(3, device="simulated:0", requires_grad=True)
    y = x.to("simulated:1") * 2
    z = torch.zeros(3, device="simulated:2")
    z.copy_(y)
    assert (y.device.index, z.device.index, z.cpu().tolist()) == (1, 2, [2.0, 2.0, 2.0])
    z.sum().backward()
    assert x.grad.device == torch.device("simulated:0")
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0, 2.0], device="simulated:3"),
        lambda: torch.as_tensor([1.0, 2.0], device="simulated:3"),
        lambda: torch.ones(2).to("simulated:3"),
        lambda: torch.ones(2).simulated(3),
        lambda: torch.zeros(2, device="simulated:3").new_zeros(4),
        lambda: torch.full_like(torch.zeros(2, device="simulated:3"), 2.0),
        lambda: torch.linspace(0, 1, 3, device="simulated:3"),
        lambda: torch.tril_indices(3, 3, device="simulated:3"),
        lambda: torch.zeros(2).to(torch.zeros(1, device="simulated:3")),
        lambda: nn.Linear(2, 2, device="simulated:3").weight,
        lambda: nn.Linear(2, 2, device="meta").to_empty(device="simulated:3").weight,
    ],
)
def test_every_way_of_making_a_tensor_reaches_the_device(make: Callable[[], Tensor]) -> None:
    assert make().device == torch.device("simulated:3")


def test_default_device() -> None:
    with torch.device("simulated:1"):
        assert {t.device.index for t in (torch.ones(1), torch.randn(2), torch.arange(3), nn.Linear(2, 2).weight)} == {1}
