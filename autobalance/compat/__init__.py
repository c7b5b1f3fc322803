"""Every private name of torch and Lightning that autobalance uses: one place tells what a new release may break.

Each function here has a test that fails loudly when the name behind it moves.
"""

from __future__ import annotations

from autobalance.compat.backend import NEWEST_TESTED_TORCH as NEWEST_TESTED_TORCH
from autobalance.compat.backend import PRIVATE_BACKEND_KEYS as PRIVATE_BACKEND_KEYS
from autobalance.compat.backend import flops_of as flops_of
from autobalance.compat.backend import foreach_on_fakes as foreach_on_fakes
from autobalance.compat.backend import private_backend_name as private_backend_name
from autobalance.compat.backend import register_python_backend as register_python_backend
from autobalance.compat.backend import support_foreach as support_foreach
from autobalance.compat.backend import warn_if_torch_is_untested as warn_if_torch_is_untested
from autobalance.compat.cuda import drop_cuda_workspaces as drop_cuda_workspaces
from autobalance.compat.kernels import as_written as as_written
from autobalance.compat.kernels import attention_order as attention_order
from autobalance.compat.kernels import drop_library as drop_library
from autobalance.compat.kernels import is_compiled as is_compiled
from autobalance.compat.lightning import TrainerChoice as TrainerChoice
from autobalance.compat.lightning import call_around_hooks as call_around_hooks
from autobalance.compat.lightning import call_before_strategy_is_chosen as call_before_strategy_is_chosen
from autobalance.compat.lightning import closure_classes as closure_classes
from autobalance.compat.lightning import configured_optimizers as configured_optimizers
from autobalance.compat.lightning import data_owners as data_owners
from autobalance.compat.lightning import fresh_iterator as fresh_iterator
from autobalance.compat.lightning import gives_one_after_the_other as gives_one_after_the_other
from autobalance.compat.lightning import lightning_optimizer as lightning_optimizer
from autobalance.compat.lightning import loader_attachment_kept as loader_attachment_kept
from autobalance.compat.lightning import request_loaders as request_loaders
from autobalance.compat.lightning import result_collection as result_collection
from autobalance.compat.lightning import set_lightning_device as set_lightning_device
from autobalance.compat.lightning import skips_backward as skips_backward
from autobalance.compat.lightning import stepping_scaler as stepping_scaler
from autobalance.compat.lightning import transferred_batch as transferred_batch
from autobalance.compat.lightning import trial_precision as trial_precision
from autobalance.compat.modes import accumulates_gradients as accumulates_gradients
from autobalance.compat.modes import autocast_keeps_casts as autocast_keeps_casts
from autobalance.compat.modes import call_around_backward as call_around_backward
from autobalance.compat.modes import call_at_checkpoint as call_at_checkpoint
from autobalance.compat.modes import current_node as current_node
from autobalance.compat.modes import dispatching_to_python as dispatching_to_python
from autobalance.compat.modes import excluded_autocast as excluded_autocast
from autobalance.compat.modes import function_modes as function_modes
from autobalance.compat.modes import in_backward as in_backward
from autobalance.compat.modes import insert_function_mode as insert_function_mode
from autobalance.compat.modes import is_node_of as is_node_of
from autobalance.compat.modes import modes_disabled as modes_disabled
from autobalance.compat.modes import next_number as next_number
from autobalance.compat.modes import number_of as number_of
from autobalance.compat.modes import on_autocast_exit as on_autocast_exit
from autobalance.compat.modes import raised_in_backward as raised_in_backward
from autobalance.compat.modes import remove_function_mode as remove_function_mode
from autobalance.compat.modes import saved_tensor_hooks_are_active as saved_tensor_hooks_are_active
from autobalance.compat.modes import single_threaded_backward as single_threaded_backward
from autobalance.compat.modes import unseen_by_transformers as unseen_by_transformers
from autobalance.compat.tensors import assign_plain_data as assign_plain_data
from autobalance.compat.tensors import constant_of as constant_of
from autobalance.compat.tensors import gradient_setter as gradient_setter
from autobalance.compat.tensors import is_fake as is_fake
from autobalance.compat.tensors import is_last_reference as is_last_reference
from autobalance.compat.tensors import is_view as is_view
from autobalance.compat.tensors import make_fake_mode as make_fake_mode
from autobalance.compat.tensors import make_wrapper as make_wrapper
from autobalance.compat.tensors import moves_more_than_tensors as moves_more_than_tensors
from autobalance.compat.tensors import parts_of as parts_of
from autobalance.compat.tensors import rebuilt as rebuilt
from autobalance.compat.tensors import replace_tensor as replace_tensor
from autobalance.compat.tensors import reshape_wrapper as reshape_wrapper
from autobalance.compat.tensors import set_data_hook as set_data_hook
from autobalance.compat.tensors import storage_key as storage_key
from autobalance.compat.tensors import version as version
from autobalance.compat.tensors import without_torch_function as without_torch_function
