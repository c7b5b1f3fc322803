"""Every private name of torch and Lightning that autobalance uses, so that one file tells what a new release may break.

Each function here has a test that fails loudly when the name behind it moves.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import nn, overrides
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils, _mode_utils, backend_registration, checkpoint
from torch.utils.data import DataLoader
from torch.utils.flop_counter import flop_registry

NEWEST_TESTED_TORCH = (2, 13)
_torch_is_checked = False


def remove_function_mode(mode: overrides.TorchFunctionMode) -> int | None:
    """Take `mode` off the stack of torch function modes, wherever it is.

    Args:
        mode: an entered torch function mode.

    Returns:
        The number of modes above it, for `insert_function_mode`; None if it is not on the stack.
    """
    above = []
    found = False
    while function_modes() and not found:
        top = overrides._pop_mode()
        found = top is mode
        if not found:
            above.append(top)
    for other in reversed(above):
        overrides._push_mode(other)
    return len(above) if found else None


def insert_function_mode(mode: overrides.TorchFunctionMode, above: int) -> None:
    """Put `mode` back below the `above` topmost torch function modes."""
    others = [overrides._pop_mode() for _ in range(above)]
    overrides._push_mode(mode)
    for other in reversed(others):
        overrides._push_mode(other)


def function_modes() -> list[overrides.TorchFunctionMode]:
    """The torch function modes that are active in this thread, innermost last."""
    return list(overrides._get_current_function_mode_stack())


def call_at_checkpoint(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have activation checkpointing, for the rest of the process, run `wrap(function)` for each function it is given.

    The function runs again in backward, when the modes that were active around the forward are no longer.

    Args:
        wrap: a function of a module, asked at each checkpoint; given again, it is not wrapped twice.
    """
    if hasattr(checkpoint, "_wrapped_by_autobalance"):
        return
    plain_generator, plain_function = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction

    @wraps(plain_generator)
    def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return plain_generator(wrap(fn), *args, **kwargs)

    class CheckpointFunction(plain_function):  # type: ignore[misc, valid-type]  # torch declares no type for it
        @classmethod
        def apply(cls, run_function: Callable[..., Any], *args: Any) -> Any:
            return super().apply(wrap(run_function), *args)

    checkpoint._checkpoint_without_reentrant_generator = generator
    checkpoint.CheckpointFunction = CheckpointFunction  # type: ignore[misc]
    checkpoint._wrapped_by_autobalance = True  # type: ignore[attr-defined]


def warn_if_torch_is_untested() -> None:
    """Warn, once a process, if torch is newer than the newest release that the private names here were tested with."""
    global _torch_is_checked
    if _torch_is_checked:
        return
    _torch_is_checked = True
    installed = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if installed > NEWEST_TESTED_TORCH:
        newest = ".".join(map(str, NEWEST_TESTED_TORCH))
        warnings.warn(
            f"torch {torch.__version__} is newer than {newest}, the newest release that autobalance was tested with. "
            f"If anything fails, try `pip install 'torch=={newest}.*'` or a newer autobalance.",
            stacklevel=2,
        )


def set_lightning_device(module: nn.Module, device: torch.device) -> None:
    """Make `LightningModule.device` of `module`, and of those inside it, say `device`; nothing is moved."""
    for part in module.modules():
        if any(base.__name__ == "_DeviceDtypeModuleMixin" for base in type(part).__mro__):
            vars(part)["_device"] = device


def request_loaders(package: str, loop: Any) -> Any:
    """What the user's loader hook or argument gives for `loop`: a loader, a collection of them, or None.

    Args:
        package: the Lightning package of the loop, "pytorch_lightning" or "lightning.pytorch".
        loop: a fit or evaluation loop of its Trainer.
    """
    source = loop._data_source
    if source.instance is None or not source.is_defined():
        return None
    return import_module(f"{package}.trainer.connectors.data_connector")._request_dataloader(source)


def data_owners(trainer: Any) -> list[Any]:
    """Where the loaders of every loop come from: loaders given to the Trainer, or the modules whose hooks make them."""
    loops = (
        trainer.fit_loop,
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
    )
    owners = {id(loop._data_source.instance): loop._data_source.instance for loop in loops}
    return [owner for owner in owners.values() if owner is not None]


@contextlib.contextmanager
def loader_attachment_kept(trainer: Any) -> Iterator[None]:
    """Undo on leaving what `trainer.estimated_stepping_batches` does inside: it starts the loader of epoch 0."""
    loop = vars(trainer.fit_loop)
    kept, kept_here = dict(loop), {name: vars(trainer)[name] for name in _DATA_ATTRIBUTES if name in vars(trainer)}
    try:
        yield
    finally:
        loop.clear()
        loop.update(kept)
        for name in _DATA_ATTRIBUTES:
            vars(trainer).pop(name, None)
        vars(trainer).update(kept_here)


_DATA_ATTRIBUTES = ("val_check_batch", "_train_start_time", "_last_val_time")


def fresh_iterator(loader: Any) -> Any:
    """An iterator over `loader` that leaves the persistent workers of a torch DataLoader alone."""
    return loader._get_iterator() if isinstance(loader, DataLoader) else iter(loader)


def gives_one_after_the_other(loader: Any) -> bool:
    """Whether a CombinedLoader of Lightning gives the batches of its loaders in turn, not one of each together."""
    return bool(loader._mode == "sequential")


def skips_backward(trainer: Any) -> bool:
    """Whether the running epoch only updates statistics, as weight averaging does for batch norm."""
    return bool(trainer.fit_loop._skip_backward)


class TrainerChoice:
    """What a Trainer has chosen before it makes its strategy, and what may still be changed.

    Args:
        connector: the Trainer's accelerator connector.
    """

    def __init__(self, connector: Any) -> None:
        self._connector = connector

    @property
    def package(self) -> str:
        """The Trainer's Lightning package."""
        return str(type(self._connector).__module__.partition(".trainer.")[0])

    @property
    def accelerator(self) -> Any:
        """The accelerator."""
        return self._connector.accelerator

    @property
    def devices(self) -> list[torch.device]:
        """The devices to use."""
        return list(self._connector._parallel_devices)

    @property
    def strategy(self) -> Any:
        """A name in the strategy registry, or a strategy."""
        return self._connector._strategy_flag

    @property
    def precision(self) -> str:
        """The precision by name."""
        return str(self._connector._precision_flag)

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin that the user gave, or None."""
        return self._connector._precision_plugin_flag

    def use_precision(self, plugin: Any) -> None:
        """Have the Trainer use `plugin`."""
        self._connector._precision_plugin_flag = plugin

    def use_root_device(self, device: torch.device) -> None:
        """Have a single-device strategy use `device`."""
        if hasattr(self.strategy, "_root_device"):
            self.strategy._root_device = device


def call_before_strategy_is_chosen(package: str, check: Callable[[TrainerChoice], None]) -> None:
    """Have `check(choice)` called whenever a Trainer of `package` has chosen its devices but not made its strategy.

    Lightning gives an accelerator no say in the choice of strategy and precision, and launches processes soon after.

    Args:
        package: "pytorch_lightning" or "lightning.pytorch".
        check: may change the choice or raise.
    """
    connector = import_module(f"{package}.trainer.connectors.accelerator_connector")._AcceleratorConnector
    make = connector._init_strategy
    if hasattr(make, "__wrapped__"):  # done already
        return

    @wraps(make)
    def checked(self: Any) -> None:
        check(TrainerChoice(self))
        make(self)

    connector._init_strategy = checked


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return torch._C._current_autograd_node() is not None


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations of one operator call, by torch's own formulas; 0 for an operator that has none.

    Args:
        func: the operator overload.
        args, kwargs, result: of the call.
    """
    formula = flop_registry.get(getattr(func, "_overloadpacket", None))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def private_backend_name() -> str:
    """Name of torch's one free device type: "privateuseone" until a backend takes it."""
    return str(torch._C._get_privateuse1_backend_name())


def register_python_backend(name: str, module: Any, before_guard: Callable[[], None]) -> None:
    """Give torch's free device type to a backend that is written in Python, for the rest of the process.

    Args:
        name: of the device type.
        module: becomes `torch.<name>`; its `is_available` answers for the accelerator.
        before_guard: called whenever torch asks for the type of the device, which it does with errors pending.
    """
    private = torch._C._autograd.DeviceType.PrivateUse1

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            before_guard()
            return private

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return bool(module.is_available())

        def has_primary_context(self, device_index: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    backend_registration._setup_privateuseone_for_python_backend(
        name, backend_module=module, hook=Hooks(), device_guard=Guard()
    )


def without_torch_function() -> Any:
    """A `__torch_function__` for tensor subclasses that leaves everything to `__torch_dispatch__`."""
    return torch._C._disabled_torch_function_impl


def make_wrapper(cls: type, like: torch.Tensor, device: torch.device, requires_grad: bool) -> Any:
    """A tensor of class `cls` with the sizes, strides and type of `like`, on `device`, without data of its own."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device,
        requires_grad=requires_grad,
    )


def reshape_wrapper(wrapper: torch.Tensor, like: torch.Tensor, fresh: torch.Tensor) -> None:
    """Change the sizes and strides that `wrapper` reports, below autograd and below its own dispatch.

    Args:
        wrapper: tensor made by `make_wrapper`.
        like: has the wanted sizes, strides and offset.
        fresh: another wrapper made for `like`; its (empty) storage is large enough, the present one may not be.
    """
    with _mode_utils.no_dispatch():
        torch._functionalize_unsafe_set(wrapper, fresh)
        before = torch._C._meta_in_tls_dispatch_include()
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            torch.ops.aten.as_strided_.default(wrapper, like.shape, like.stride(), like.storage_offset())
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Identity of a storage, unique among the living."""
    return int(storage._cdata)


def replace_tensor(tensor: torch.Tensor, fresh: torch.Tensor) -> None:
    """Let the Python object `tensor` stand for what `fresh` stands for, keeping its identity and hooks.

    Like `torch.utils.swap_tensors`, but weak references to `tensor` stay with it instead of being an error.
    """
    private: Any = tensor
    hooks, post_hooks = private._backward_hooks, private._post_accumulate_grad_hooks
    if private._use_count() > 1:  # a graph that still accumulates into what `tensor` stood for
        torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(_refuse_backward)
    torch._C._swap_tensor_impl(tensor, fresh)
    if hooks is not None:
        private._backward_hooks = hooks
    if post_hooks is not None:
        private._post_accumulate_grad_hooks = post_hooks


def _refuse_backward(gradients: Any) -> None:
    raise RuntimeError(
        "backward reached a parameter that was moved to another device after the forward; move the module before "
        "the forward or after the backward"
    )


@contextlib.contextmanager
def excluded_autocast() -> Iterator[None]:
    """Inside, autocast of torch's one free device type leaves operations alone."""
    with torch._C._ExcludeDispatchKeyGuard(_PRIVATE_AUTOCAST):
        yield


_keys: Any = torch._C.DispatchKey  # torch's own stubs list only some of them
_PRIVATE_AUTOCAST = torch._C.DispatchKeySet(_keys.AutocastPrivateUse1)


def on_autocast_exit(clear: Callable[[], None]) -> None:
    """Call `clear` whenever torch drops its cache of cast weights, which is when the outermost autocast exits."""
    clear_torchs = torch.clear_autocast_cache

    @wraps(clear_torchs)
    def clear_both() -> None:
        clear()
        clear_torchs()

    torch.clear_autocast_cache = clear_both


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd tracks a tensor as a view of another."""
    return bool(tensor._is_view())


@contextlib.contextmanager
def dispatching_to_python() -> Iterator[None]:
    """Inside, tensor subclasses and dispatch modes see operations even where torch hides them, as in `torch.tensor`."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude - _PYTHON):
        yield


_PYTHON = torch._C.DispatchKeySet(torch._C.DispatchKey.Python) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.PythonTLSSnapshot
)

PRIVATE_BACKEND_KEYS = ("PrivateUse1", "AutocastPrivateUse1")
"""Dispatch keys, as `torch.library` names them, of torch's one free device type and of its autocast."""


def single_threaded_backward(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let every backward of this process run in the thread that asks for it, save those of CUDA.

    A Python backend counts as one device in torch, so the engine has no thread for its further devices.

    Args:
        around: makes of the engine the function that is called instead.
    """
    autograd: Any = torch.autograd
    engine = around(autograd._engine_run_backward)

    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        name = private_backend_name()
        on_backend = (isinstance(output, torch.Tensor) and output.device.type == name for output in outputs)
        if torch.cuda.is_initialized() and not any(on_backend):
            return engine(outputs, *args, **kwargs)
        with torch.autograd.set_multithreading_enabled(False):
            return engine(outputs, *args, **kwargs)

    autograd._engine_run_backward = run


def call_around_backward(context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Have every backward, for the rest of the process, run inside `context()`.

    Args:
        context: a function of a module, asked at each backward; given again, it is not entered twice.
    """
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward
    if hasattr(autograd, "_context_of_autobalance"):
        return

    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return engine(*args, **kwargs)

    autograd._engine_run_backward = run
    autograd._context_of_autobalance = context


def set_data_hook(handles: Callable[[torch.Tensor, torch.Tensor], bool], replace: Callable[..., None]) -> None:
    """Let `replace(tensor, value)` carry out `tensor.data = value` wherever `handles(tensor, value)`.

    `Module.to` and its like then keep parameters as they do on CUDA, since they assign to `.data` too.
    """
    untyped: Any = torch
    plain = untyped._C.TensorBase.data
    compatible = untyped._has_compatible_shallow_copy_type

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(value, torch.Tensor) and handles(tensor, value):
            replace(tensor, value)
        else:
            plain.__set__(tensor, value)

    @wraps(compatible)  # torch's compiler looks at the signature
    def is_compatible(tensor: torch.Tensor, value: torch.Tensor) -> bool:
        return handles(tensor, value) or bool(compatible(tensor, value))

    untyped.Tensor.data = property(plain.__get__, assign)
    untyped._has_compatible_shallow_copy_type = is_compatible


def assign_plain_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """torch's own `tensor.data = value`, past `set_data_hook`."""
    base: Any = torch._C.TensorBase
    base.data.__set__(tensor, value)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has sizes only, no numbers."""
    return isinstance(tensor, FakeTensor)


def configured_optimizers(package: str, module: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers and learning-rate schedulers that `module.configure_optimizers()` returns, in any form.

    Args:
        package: "pytorch_lightning" or "lightning.pytorch".
        module: a LightningModule.
    """
    optimizers, schedulers = import_module(f"{package}.core.optimizer")._init_optimizers_and_lr_schedulers(module)
    return list(optimizers), list(schedulers)


def lightning_optimizer(package: str, optimizer: Any, strategy: Any) -> Any:
    """The wrapper in which Lightning hands an optimizer to the user's step.

    Args:
        package: "pytorch_lightning" or "lightning.pytorch".
        optimizer: a torch optimizer.
        strategy: whose `optimizer_step` the wrapper calls.
    """
    return import_module(f"{package}.core.optimizer").LightningOptimizer._to_lightning_optimizer(optimizer, strategy)


def closure_classes(package: str) -> tuple[Any, Any]:
    """Lightning's closure of a step, and the class of its result, which keep the loss alive as in a real run."""
    automatic = import_module(f"{package}.loops.optimization.automatic")
    return automatic.Closure, automatic.ClosureResult


def transferred_batch(module: Any, batch: Any, device: torch.device, loader: int) -> Any:
    """The batch after the module's own hooks before, at and after its transfer to `device`."""
    batch = module._on_before_batch_transfer(batch, dataloader_idx=loader)
    return module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=loader)


def trial_precision(plugin: Any, device: torch.device) -> Any:
    """A precision plugin that works like `plugin` on `device` and shares no state with it."""
    twin = copy.copy(plugin)
    if hasattr(twin, "autocast_context_manager"):
        twin.device = device.type
    if getattr(twin, "scaler", None) is not None:
        twin.scaler = _SteppingScaler(device.type)
    return twin


class _SteppingScaler(torch.amp.GradScaler):
    """A gradient scaler that never skips a step: whether a gradient is infinite only real numbers tell."""

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)


def modes_disabled() -> contextlib.AbstractContextManager[Any]:
    """A context in which no dispatch mode is active, for work on real tensors in the middle of a trace."""
    disabled: contextlib.AbstractContextManager[Any] = torch.utils._python_dispatch._disable_current_modes()
    return disabled


@contextlib.contextmanager
def foreach_on_fakes() -> Iterator[None]:
    """Let optimizers treat fake tensors as the tensors they stand for, and choose foreach where CUDA's would."""
    types = import_module("torch.optim.optimizer")._foreach_supported_types
    added = FakeTensor not in types
    if added:
        types.append(FakeTensor)
    try:
        yield
    finally:
        if added:
            types.remove(FakeTensor)


def moves_more_than_tensors(module: nn.Module) -> bool:
    """Whether a module has its own idea of being moved, as metrics do, whose state is in plain attributes."""
    return type(module)._apply is not nn.Module._apply


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; one made in inference mode does not count."""
    return tensor._version


def gradient_setter() -> Any:
    """What a torch function mode is told that `tensor.grad = value` calls."""
    return vars(torch._C.TensorBase)["grad"].__set__


def support_foreach(cls: Any) -> None:
    """Let optimizers and gradient clipping choose their foreach form by default for parameters of class `cls`."""
    for supported in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        supported.append(cls)


def constant_of(fake: torch.Tensor) -> torch.Tensor | None:
    """The real value that torch itself keeps beside a fake made from a number, None for any other."""
    constant: torch.Tensor | None = getattr(fake, "constant", None)
    return constant


def result_collection(package: str, training: bool) -> Any:
    """The collection in which Lightning keeps what a step logs.

    Args:
        package: "pytorch_lightning" or "lightning.pytorch".
        training: whether the step is a training step.
    """
    return import_module(f"{package}.trainer.connectors.logger_connector.result")._ResultCollection(training)
