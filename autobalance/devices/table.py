"""Common GPUs: what a process can use of their memory, and their rates.

Capacities are the smallest "total capacity" that PyTorch's out-of-memory messages show for the card in public bug
reports (it lies below the label: the driver and error correction keep a part). Rates are the vendor's datasheet
figures: dense (without sparsity), boost clock. A link is the datasheet's total bandwidth halved (one way): NVLink where
the card has it, else PCIe. A rate of tf32 or bf16 equals fp32 where the card has no such unit.
"""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 2**30
_PCIE3 = 16e9  # bytes per second, one way, 16 lanes: PCI Express base specification 3.0
_PCIE4 = 32e9  # bytes per second, one way, 16 lanes: PCI Express base specification 4.0


@dataclass(frozen=True)
class GPU:
    """Figures of one kind of GPU.

    Attributes:
        name: the word used in `"4xA100-80GB"`.
        capability: CUDA's compute capability, which decides between kernels.
        capacity: bytes that a process can use.
        fp32, tf32, bf16: operations per second.
        bandwidth: bytes per second of its memory.
        link: bytes per second to a neighbour, one way.
        driver_names: what the driver calls it, as `torch.cuda.get_device_name` reports; lower case, a part is enough.
    """

    name: str
    capability: tuple[int, int]
    capacity: int
    fp32: float
    tf32: float
    bf16: float
    bandwidth: float
    link: float
    driver_names: tuple[str, ...]


def _gpu(
    name: str,
    capability: tuple[int, int],
    gib: float,
    fp32: float,
    tf32: float,
    bf16: float,
    bandwidth: float,
    link: float,
    *driver_names: str,
) -> GPU:
    return GPU(name, capability, int(gib * _GIB), fp32, tf32, bf16, bandwidth, link, driver_names)


GPUS = (
    # NVIDIA Tesla V100 datasheet (SXM2; NVLink 300 GB/s); "15.75 GiB total capacity"
    _gpu("V100-16GB", (7, 0), 15.75, 15.7e12, 15.7e12, 15.7e12, 900e9, 150e9, "v100-sxm2-16gb", "v100-pcie-16gb"),
    # NVIDIA Tesla V100 datasheet (SXM2); "31.74 GiB total capacity"
    _gpu("V100-32GB", (7, 0), 31.74, 15.7e12, 15.7e12, 15.7e12, 900e9, 150e9, "v100-sxm2-32gb", "v100-pcie-32gb"),
    # NVIDIA T4 datasheet (PCIe 3.0); "14.75 GiB"
    _gpu("T4", (7, 5), 14.75, 8.1e12, 8.1e12, 8.1e12, 320e9, _PCIE3, "tesla t4"),
    # NVIDIA L4 datasheet (PCIe 4.0; its tensor rates with sparsity, halved); label less the driver's share, as for A10
    _gpu("L4", (8, 9), 21.9, 30.3e12, 60e12, 121e12, 300e9, _PCIE4, "nvidia l4"),
    # NVIDIA A10 datasheet (PCIe 4.0); label less the 7 % that error correction and the driver keep on such cards
    _gpu("A10", (8, 6), 21.9, 31.2e12, 62.5e12, 125e12, 600e9, _PCIE4, "nvidia a10"),
    # NVIDIA A100 datasheet (SXM4; NVLink 600 GB/s); "39.50 GiB", less a tenth seen between driver versions
    _gpu("A100-40GB", (8, 0), 39.4, 19.5e12, 156e12, 312e12, 1555e9, 300e9, "a100-sxm4-40gb", "a100-pcie-40gb"),
    # NVIDIA A100 datasheet (SXM4; NVLink 600 GB/s); "79.14 GiB"
    _gpu("A100-80GB", (8, 0), 79.14, 19.5e12, 156e12, 312e12, 2039e9, 300e9, "a100-sxm4-80gb", "a100 80gb pcie"),
    # NVIDIA L40S datasheet (PCIe 4.0; its tensor rates with sparsity, halved); "44.40 GiB" (L40, same memory)
    _gpu("L40S", (8, 9), 44.4, 91.6e12, 183e12, 362e12, 864e9, _PCIE4, "nvidia l40s"),
    # NVIDIA Ampere GA102 whitepaper, appendix A (dense, fp32 accumulate; PCIe 4.0); "23.67 GiB"
    _gpu("RTX3090", (8, 6), 23.67, 35.6e12, 35.6e12, 71e12, 936e9, _PCIE4, "rtx 3090"),
    # NVIDIA Ada GPU architecture whitepaper, appendix A (dense, fp32 accumulate; PCIe 4.0); "23.52 GiB"
    _gpu("RTX4090", (8, 9), 23.52, 82.6e12, 82.6e12, 165.2e12, 1008e9, _PCIE4, "rtx 4090"),
    # NVIDIA H100 datasheet (SXM5; NVLink 900 GB/s; tensor rates with sparsity, halved); "79.11 GiB"
    _gpu("H100-80GB", (9, 0), 79.1, 67e12, 494.5e12, 989.5e12, 3350e9, 450e9, "h100 80gb hbm3"),
    # NVIDIA H200 datasheet (SXM; NVLink 900 GB/s; tensor rates with sparsity, halved); about 139 GiB seen by a process
    _gpu("H200", (9, 0), 139.0, 67e12, 494.5e12, 989.5e12, 4800e9, 450e9, "nvidia h200"),
)

# Words with only one meaning worth having.
_SHORT = {
    "a100": "A100-80GB",
    "h100": "H100-80GB",
    "v100": "V100-32GB",
    "a10g": "A10",
    "3090": "RTX3090",
    "4090": "RTX4090",
}


def find_gpu(word: str) -> GPU | None:
    """The GPU that a word such as `A100-80GB` names, None for a word that names none.

    Example:
        >>> find_gpu("a100-80gb").capacity
    """
    wanted = _SHORT.get(word.lower(), word).lower().replace("_", "-").replace(" ", "")
    return next((gpu for gpu in GPUS if gpu.name.lower() == wanted), None)


def recognise(driver_name: str) -> GPU | None:
    """The GPU that the driver's name for a card stands for, None for a card that the table lacks.

    Example:
        >>> recognise("NVIDIA A100-SXM4-80GB").name
        'A100-80GB'
    """
    name = driver_name.lower()
    found = [(len(part), gpu) for gpu in GPUS for part in gpu.driver_names if part in name]
    # The longest part wins: "nvidia l4" is also in "nvidia l40s".
    return max(found, key=lambda pair: pair[0])[1] if found else None
