from __future__ import annotations

import torch
from torch import nn

import autobalance


def test_tensors_move_and_are_viewed_in_inference_mode() -> None:
    with autobalance.simulate("2x1MiB"):
        outside = torch.arange(6).to("simulated:1")
        with torch.inference_mode():
            inside = torch.arange(6).to("simulated:1")
            for tensor in (outside, inside):
                view = tensor[:-1]
                assert view.device == torch.device("simulated", 1)
                assert view.to("simulated:0").device == torch.device("simulated", 0)
                assert view.cpu().tolist() == [0, 1, 2, 3, 4]
            outside[:2].add_(5)
        assert outside.tolist() == [5, 6, 2, 3, 4, 5]


def test_modules_run_in_inference_mode_without_a_graph() -> None:
    linear, recurrent = nn.Linear(3, 3), nn.LSTM(3, 3)
    inputs = torch.randn(2, 1, 3)
    expected = recurrent(linear(inputs))[0].detach()
    with autobalance.simulate("1x1MiB"), torch.inference_mode():
        device = torch.device("simulated", 0)
        output = recurrent.to(device)(linear.to(device)(inputs.to(device)))[0]
        assert not output.requires_grad
        torch.testing.assert_close(output.cpu(), expected)
    assert linear.weight.requires_grad
