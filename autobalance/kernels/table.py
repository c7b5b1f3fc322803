"""What differs between releases of torch and between GPUs, as rows that name the source they were read from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from autobalance.kernels.target import Target, TargetKind

Certainty = Literal["exact", "modelled", "allowance"]
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One value, and from where on it holds.

    Attributes:
        value: what holds.
        torch: the first release, as (major, minor), that has it.
        capability: the first compute capability that has it.
        below: the first compute capability that has it no longer.
        kind: "hip" for a row that holds on AMD GPUs only; None: on all.
    """

    value: Any
    torch: tuple[int, int] = (0, 0)
    capability: tuple[int, int] = (0, 0)
    below: tuple[int, int] = (99, 0)
    kind: TargetKind | None = None

    def holds(self, target: Target, release: tuple[int, int]) -> bool:
        """Whether the row is about this GPU and this release of torch.

        Args:
            target: whose kernel it is.
            release: of torch, major and minor.
        """
        here = self.kind is None or self.kind == target.kind
        return here and self.torch <= release and self.capability <= target.capability < self.below


@dataclass(frozen=True)
class Table:
    """A fact that depends on the release of torch or on the GPU.

    Attributes:
        name: of the fact, in words.
        source: file of pytorch that says so.
        rows: of those that hold, the last counts.
        certainty: "exact" where the source gives the bytes, "modelled" where a formula stands for a closed library's
            answer, "allowance" where only measuring can tell.
    """

    name: str
    source: str
    rows: tuple[Row, ...]
    certainty: Certainty = "exact"

    def value(self, target: Target, release: tuple[int, int]) -> Any:
        """The value for a GPU and a release of torch; None if no row speaks of them.

        Args:
            target: whose kernel it is.
            release: of torch, major and minor.
        """
        found = None
        for row in self.rows:
            if row.holds(target, release):
                found = row.value
        return found


_TRANSFORMERS = "aten/src/ATen/native/transformers/"

BF16 = Table(
    "the fused attention kernels take bfloat16",
    _TRANSFORMERS + "cuda/sdp_utils.cpp (check_dtypes_low_precision)",
    (Row(False), Row(True, capability=(8, 0))),
)
FLASH = Table(
    "flash attention exists",
    _TRANSFORMERS + "cuda/sdp_utils.cpp (check_flash_attention_hardware_support)",
    (Row(False), Row(True, capability=(8, 0), below=(12, 2))),
)
CUDNN_FIRST = Table(
    "cuDNN's attention is tried before flash",
    _TRANSFORMERS + "cuda/sdp_utils.cpp (check_prefer_cudnn_attention)",
    (Row(False), Row(True, capability=(9, 0), below=(11, 0)), Row(False, kind="hip")),
)
CUDNN = Table(
    "cuDNN's attention exists",
    _TRANSFORMERS + "cuda/sdp_utils.cpp (check_cudnn_hardware_support, can_use_cudnn_attention)",
    (Row(False), Row(True, capability=(8, 0), below=(12, 2)), Row(False, kind="hip")),
)
CUDNN_HEAD = Table(
    "largest head of cuDNN's attention",
    _TRANSFORMERS + "cuda/sdp_utils.cpp (check_cudnn_tensor_shapes)",
    (Row(128),),
)
EFFICIENT_ALIGNMENT = Table(
    "efficient attention needs heads that are a multiple of (16-bit types, 32-bit types)",
    _TRANSFORMERS + "cuda/sdp_utils.cpp (minimum_gemm_alignment)",
    (Row((1, 1)), Row((8, 1), capability=(7, 0)), Row((8, 4), capability=(8, 0)), Row((8, 8), kind="hip")),
)
EFFICIENT_GROUPED = Table(
    "efficient attention takes fewer key heads than query heads",
    _TRANSFORMERS + "cuda/mem_eff_attention/kernel_backward.h (q_heads_per_kv)",
    (Row(False), Row(True, torch=(2, 14)), Row(False, kind="hip")),
)
ONE_KEY_HEAD = Table(
    "fused attention takes one key head for all query heads without enable_gqa",
    _TRANSFORMERS + "sdp_utils_cpp.h (check_batch_size_and_num_heads_dense, supports_mqa)",
    (Row(False), Row(True, torch=(2, 14))),
)
UNBATCHED = Table(
    "fused attention takes query, key and value without a batch dimension",
    _TRANSFORMERS + "sdp_utils_cpp.h (normalize_unbatched_input)",
    (Row(False), Row(True, torch=(2, 14))),
)
SHARED_MEMORY = Table(
    "large tiles of the efficient backward fit into a block's shared memory",
    _TRANSFORMERS + "cuda/attention_backward.cu (sharedMemPerBlockOptin); CUDA programming guide, 163 KiB or 99 KiB",
    (
        Row(True),
        Row(False, capability=(7, 5), below=(8, 0)),
        Row(False, capability=(8, 6), below=(8, 7)),
        Row(False, capability=(8, 9), below=(9, 0)),
        Row(False, capability=(12, 0)),
    ),
    "modelled",
)
PROCESSORS = Table(
    "streaming multiprocessors, by which flash attention splits keys",
    _TRANSFORMERS + "cuda/flash_attn/flash_api.cpp (num_splits_heuristic); datasheets",
    (
        Row(80),
        Row(40, capability=(7, 5)),
        Row(108, capability=(8, 0)),
        Row(82, capability=(8, 6)),
        Row(128, capability=(8, 9)),
        Row(132, capability=(9, 0)),
        Row(148, capability=(10, 0)),
        Row(170, capability=(12, 0)),
    ),
    "modelled",
)
FUSED_RMS_NORM = Table(
    "rms_norm is one kernel",
    "aten/src/ATen/native/layer_norm.cpp (rms_norm_symint)",
    (Row(False), Row(True, torch=(2, 9))),
)
GROUP_NORM_COPIES = Table(
    "group_norm copies what is not contiguous by an operation of its own, not inside its kernel",
    "aten/src/ATen/native/group_norm.cpp (group_norm), tools/autograd/derivatives.yaml (native_group_norm)",
    (Row(True), Row(False, torch=(2, 14))),
)
EMBEDDING_BLOCKS = Table(
    "blocks a multiprocessor below which an embedding's gradient is added up in one pass; 0: always in two",
    "aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu (use_fused_kernel)",
    (Row(0), Row(4, torch=(2, 11))),
)
CUBLAS_WORKSPACE = Table(
    "bytes of cuBLAS's workspace, one for each thread that multiplies on a device",
    "aten/src/ATen/cuda/CublasHandlePool.cpp (parseChosenWorkspaceSize)",
    (Row(8 * MIB + MIB // 8), Row(32 * MIB, capability=(9, 0), below=(13, 0)), Row(32 * MIB, kind="hip")),
)

TABLES = (
    BF16,
    FLASH,
    CUDNN_FIRST,
    CUDNN,
    CUDNN_HEAD,
    EFFICIENT_ALIGNMENT,
    EFFICIENT_GROUPED,
    ONE_KEY_HEAD,
    UNBATCHED,
    SHARED_MEMORY,
    PROCESSORS,
    FUSED_RMS_NORM,
    GROUP_NORM_COPIES,
    EMBEDDING_BLOCKS,
    CUBLAS_WORKSPACE,
)


def versioned(target: Target, one: tuple[int, int], other: tuple[int, int]) -> list[Table]:
    """The tables that say different things in two releases of torch.

    Args:
        target: the GPU.
        one, other: releases, as (major, minor).
    """
    return [table for table in TABLES if table.value(target, one) != table.value(target, other)]
