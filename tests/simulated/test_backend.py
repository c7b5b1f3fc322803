"""The device type in torch: registered at the first use only, refused where it cannot be, and `torch.simulated`."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import autobalance
from autobalance.simulated import from_environment, simulate

MIB, GIB = 2**20, 2**30


def output_of(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_registers_nothing_and_the_first_use_does() -> None:
    code = (
        "import torch, autobalance, autobalance.simulated.tensor, autobalance.simulated.configure\n"
        "name = torch._C._get_privateuse1_backend_name()\n"
        "autobalance.simulate('2x1GiB'); autobalance.simulate('3x1GiB')\n"
        "print(name, torch._C._get_privateuse1_backend_name(), torch.accelerator.current_accelerator(),"
        " torch.accelerator.device_count(), torch.simulated.device_count())"
    )
    assert output_of(code) == "privateuseone simulated simulated 3 3"


def test_refused_once_cuda_is_in_use() -> None:
    code = (
        "import torch, autobalance\n"
        "torch.cuda.is_initialized = lambda: True\n"
        "try: autobalance.simulate(2)\n"
        "except RuntimeError as error: print(error)"
    )
    assert "simulated devices cannot be added once CUDA is in use" in output_of(code)


def test_refused_beside_another_backend() -> None:
    code = (
        "import torch, autobalance\n"
        "torch.utils.rename_privateuse1_backend('other')\n"
        "try: autobalance.simulate(2)\n"
        "except RuntimeError as error: print(error)"
    )
    assert "the backend 'other' has taken it" in output_of(code)


def test_takes_effect_at_once_and_comes_back_afterwards() -> None:
    assert torch.simulated.device_count() == 4
    with simulate("2x1GiB,1x2GiB") as simulation:
        assert simulation.capacities == (GIB, GIB, 2 * GIB)
        assert [torch.simulated.mem_get_info(index)[1] for index in range(3)] == [GIB, GIB, 2 * GIB]
        with pytest.raises(RuntimeError, match=r"there is no simulated:3, 3 simulated device\(s\) are configured"):
            torch.ones(1, device="simulated:3")
        with simulate([100, 200]):
            assert torch.simulated.mem_get_info(1)[1] == 200
        assert torch.simulated.device_count() == 3
    assert torch.simulated.device_count() == 4
    assert torch.simulated.mem_get_info(0)[1] == sys.maxsize


def test_peaks_outside_are_untouched_by_a_configuration_inside() -> None:
    torch.simulated.reset_peak_memory_stats(0)
    x = torch.ones(MIB, device="simulated:0")
    peak = torch.simulated.max_memory_allocated(0)
    del x
    with simulate("1x1GiB"):
        assert torch.simulated.max_memory_allocated(0) == peak - 4 * MIB
        torch.ones(4 * MIB, device="simulated:0")
        assert torch.simulated.max_memory_allocated(0) == peak + 12 * MIB
    assert torch.simulated.max_memory_allocated(0) == peak


def test_tensors_outlive_their_configuration() -> None:
    with simulate(6):
        x = torch.ones(2, device="simulated:5")
    assert x.cpu().tolist() == [1.0, 1.0]


def test_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOBALANCE_SIMULATE", "2x96MiB")
    with from_environment() as simulation:
        assert simulation.capacities == (96 * 2**20,) * 2
        assert torch.simulated.device_count() == 2
    monkeypatch.setenv("AUTOBALANCE_SIMULATE", "2xlots")
    with pytest.raises(ValueError, match="the environment variable AUTOBALANCE_SIMULATE is '2xlots'"):
        from_environment()
    monkeypatch.delenv("AUTOBALANCE_SIMULATE")
    assert from_environment() is None


@pytest.mark.parametrize("devices", [0, 128, "200x1GiB", []])
def test_impossible_numbers_of_devices_are_refused(devices: object) -> None:
    with pytest.raises(ValueError, match=r"device"):
        autobalance.simulate(devices)


@pytest.mark.parametrize("devices", ["four", "4x", "4xlots"])
def test_unreadable_words_are_refused(devices: str) -> None:
    with pytest.raises(ValueError, match=r"'4x|'lots'|'four'"):
        simulate(devices)


def test_most_devices() -> None:
    with simulate(127):
        assert torch.ones(1, device="simulated:126").device.index == 126


def test_current_device() -> None:
    assert torch.ones(1, device="simulated").device.index == 0
    with torch.simulated.device(2):
        assert torch.simulated.current_device() == 2
        assert torch.ones(1, device="simulated").device.index == 2
        with torch.simulated.device("simulated:1"):
            assert torch.zeros(1, device="simulated").device.index == 1
    torch.simulated.set_device("simulated:3")
    assert torch.empty(1, device="simulated").device.index == 3
    torch.simulated.set_device(0)
    with pytest.raises(ValueError, match="expected a simulated device, got cpu"):
        torch.simulated.set_device("cpu")


def test_module_answers_what_torch_and_lightning_ask() -> None:
    torch.simulated.synchronize(1)
    torch.simulated.empty_cache()
    assert torch.simulated.is_available()
    assert torch.simulated.is_initialized()
    assert torch.simulated.get_device_name("simulated:1") == "simulated device 1"
    assert torch.simulated.get_device_properties(1).total_memory == sys.maxsize
    assert torch.get_device_module("simulated") is torch.simulated
    assert torch.bfloat16 in torch.simulated.get_amp_supported_dtype()


def drawn(device: str) -> list[float]:
    torch.manual_seed(3)
    x = torch.rand(2, device=device)
    torch.simulated.manual_seed(4)
    return [*x.tolist(), *torch.nn.functional.dropout(torch.ones(5, device=device)).tolist()]


def test_random_numbers_are_the_cpus() -> None:
    assert drawn("simulated:2") == drawn("cpu")


def test_state_of_the_generator() -> None:
    state = torch.simulated.get_rng_state(1)
    first = torch.rand(3, device="simulated:1").tolist()
    torch.simulated.set_rng_state(state, "simulated:1")
    assert torch.rand(3, device="simulated:1").tolist() == first
    with torch.random.fork_rng(devices=range(4), device_type="simulated"):
        forked = torch.rand(3, device="simulated:2").tolist()
    assert torch.rand(3, device="simulated:2").tolist() == forked


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_draws_the_same_numbers_again(reentrant: bool) -> None:
    def gradient(device: str) -> list[float]:
        torch.manual_seed(0)
        x = torch.ones(64, device=device, requires_grad=True)
        layer = lambda value: torch.nn.functional.dropout(value * 2, 0.5) ** 2
        y = checkpoint(layer, checkpoint(layer, x, use_reentrant=reentrant), use_reentrant=reentrant)
        y.sum().backward()
        return x.grad.tolist()

    assert gradient("simulated:1") == gradient("cpu")


def in_thread(work: Callable[[], object]) -> object:
    """What `work` returns in a thread that has never seen a tensor."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_gradients_in_another_thread() -> None:
    x = torch.ones(2, device="simulated:1", requires_grad=True)
    y = (x.to("simulated:3") * 3).to("simulated:2")
    seed = torch.ones(2, device="simulated:2")
    (gradient,) = in_thread(lambda: torch.autograd.grad(y, x, seed, retain_graph=True))  # type: ignore[misc]
    assert (gradient.tolist(), gradient.device.index) == ([3.0, 3.0], 1)
    in_thread(lambda: y.backward(seed))
    assert x.grad.tolist() == [3.0, 3.0]


def test_work_of_other_threads_is_charged_too() -> None:
    before = torch.simulated.memory_allocated(1)
    x = in_thread(lambda: torch.ones(1024, device="simulated:1") + 1)
    assert isinstance(x, Tensor)
    assert torch.simulated.memory_allocated(1) - before == 4096


def test_threads_do_not_disturb_each_others_counts() -> None:
    def work(index: int) -> None:
        layer = torch.nn.Linear(16, 16).to(f"simulated:{index}")
        for _ in range(20):
            layer(torch.ones(4, 16, device=f"simulated:{index}")).square().sum().backward()

    before = [torch.simulated.memory_allocated(index) for index in range(4)]
    threads = [threading.Thread(target=work, args=(index % 2,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert [torch.simulated.memory_allocated(index) for index in range(4)] == before


def test_saved_tensors_may_be_kept_on_the_host() -> None:
    x = torch.ones(256, device="simulated:1", requires_grad=True)
    before = torch.simulated.memory_allocated(1)
    with torch.autograd.graph.save_on_cpu():
        y = (x * x).exp().sum()
    assert torch.simulated.memory_allocated(1) - before == 512
    y.backward()
    assert x.grad.tolist() == pytest.approx([2 * 2.718281828] * 256)


def test_custom_function_and_double_backward() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            (x,) = ctx.saved_tensors
            return gradient * 3 * x**2

    x = torch.tensor([2.0], device="simulated:1", requires_grad=True)
    (first,) = torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)
    first.sum().backward()
    assert (first.tolist(), x.grad.tolist()) == ([12.0], [12.0])
