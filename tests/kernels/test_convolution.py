from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autobalance
from autobalance.kernels import convolution
from autobalance.kernels.convolution import CudnnCall
from autobalance.kernels.target import Target

A100 = Target("cuda", "A100", (8, 0))
V100 = Target("cuda", "V100", (7, 0))
BIG = 4 * 64 * 32 * 32
"""Bytes of one image of 64 channels and 32 x 32 pixels in float32."""


def meta(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=kind, device="meta")


def run_backward(
    target: Target,
    image: Tensor,
    weight: Tensor,
    output: Tensor,
    groups: int = 1,
    mask: tuple[bool, bool] = (True, True),
) -> tuple[CudnnCall, ...]:
    steps = ([1, 1], [1, 1], [1, 1])
    return convolution.backward(target, output, image, weight, None, *steps, False, [0, 0], groups, [*mask, False])


def run_forward(target: Target, image: Tensor, weight: Tensor, output: Tensor) -> tuple[CudnnCall, ...]:
    return convolution.forward(target, output, image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def test_a_backward_copies_image_and_gradient_once_for_each_of_its_two_kernels() -> None:
    image, weight = meta(1, 64, 32, 32), meta(64, 64, 3, 3)
    workspaces = [call.workspace for call in run_backward(A100, image, weight, meta(1, 64, 32, 32))]
    filter_bytes = 4 * 64 * 64 * 9
    assert workspaces == [2 * BIG + filter_bytes, 2 * BIG + 4 * filter_bytes]


def test_channels_are_filled_up_to_groups_of_16_bytes() -> None:
    image, weight = meta(1, 3, 32, 32), meta(64, 3, 3, 3)
    (call,) = run_backward(A100, image, weight, meta(1, 64, 32, 32), mask=(False, True))
    assert call.workspace == 4 * 4 * 32 * 32 + BIG + 4 * 4 * 64 * 3 * 9


def test_a_workspace_grows_evenly_with_the_batch() -> None:
    weight = meta(5, 7, 3, 3)
    sizes = [run_backward(A100, meta(batch, 7, 9, 9), weight, meta(batch, 5, 9, 9))[0].workspace for batch in (1, 2, 3)]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] == 4 * (8 + 8) * 81


@pytest.mark.parametrize(
    ("target", "weight", "groups"),
    [(A100, meta(64, 64, 1, 1), 1), (A100, meta(64, 16, 3, 3), 4), (V100, meta(64, 64, 3, 3), 1)],
    ids=["of one pixel", "in groups", "without tensor cores for float32"],
)
def test_kernels_that_read_images_as_they_lie_take_no_workspace(target: Target, weight: Tensor, groups: int) -> None:
    calls = run_backward(target, meta(1, 64, 32, 32), weight, meta(1, 64, 32, 32), groups)
    assert [call.workspace for call in calls] == [0, 0]


def test_images_with_the_channels_last_are_not_copied() -> None:
    image, output = (meta(1, 64, 32, 32).to(memory_format=torch.channels_last) for _ in range(2))
    weight = meta(64, 64, 3, 3).to(memory_format=torch.channels_last)
    assert [call.workspace for call in run_backward(A100, image, weight, output)] == [0, 0]


def test_a_gradient_that_is_laid_out_otherwise_is_copied_for_both_kernels() -> None:
    image, weight = meta(1, 64, 32, 32), meta(64, 64, 1, 1)
    gradient = meta(1, 64, 1, 1).expand(1, 64, 32, 32)
    assert [call.workspace for call in run_backward(A100, image, weight, gradient)] == [BIG, BIG]


def test_a_forward_copies_half_precision_only() -> None:
    image, weight = meta(1, 64, 32, 32), meta(64, 64, 3, 3)
    assert run_forward(A100, image, weight, meta(1, 64, 32, 32))[0].workspace == 0
    halves = [tensor.half() for tensor in (image, weight, meta(1, 64, 32, 32))]
    assert run_forward(V100, *halves)[0].workspace == BIG + 2 * 64 * 64 * 9


def test_depthwise_convolutions_do_not_call_cudnn() -> None:
    image = meta(1, 64, 32, 32)
    assert run_backward(A100, image, meta(64, 1, 3, 3), image, groups=64) == ()


def test_cudnn_remembers_a_problem_by_what_is_computed_and_by_shapes() -> None:
    weight = meta(64, 64, 3, 3)
    problems = {
        call.problem
        for batch in (1, 1, 2)
        for call in run_backward(A100, meta(batch, 64, 8, 8), weight, meta(batch, 64, 8, 8))
    }
    assert len(problems) == 4


def test_a_benchmark_of_kernels_gives_cached_memory_back_once_for_each_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)))
    batch = torch.zeros(2, 8, 16, 16)

    def emptied() -> int:
        return len(autobalance.profile(model, batch, target="A100-80GB").timeline.emptied)

    assert emptied() == 0
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert emptied() == 3  # the output, the image's gradient and the weight's, each the same problem for all three
