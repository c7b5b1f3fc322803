"""Common GPUs: what a process can use of their memory, and their rates.

Capacities are the smallest "total capacity" that PyTorch's out-of-memory messages show for the card in public bug
reports (it lies below the label: the driver and error correction keep a part). Rates are the vendor's datasheet
figures: dense (without sparsity), accumulated in fp32, boost clock. A rate of tf32, bf16 or fp16 equals fp32 where the
card has no such unit. A link is the datasheet's total bandwidth halved (one way): NVLink or Infinity Fabric where all
cards of a server have it, else PCIe. GeForce cards read one another's memory at most over an NVLink bridge: over PCIe
Nvidia's driver refuses (`p2pBandwidthLatencyTest` of the CUDA samples says so in public reports).
The network is that of the vendor's own server, one adapter for a GPU or two (NVIDIA DGX-1, DGX A100, DGX H100 and DGX
B200 datasheets: 100, 200, 400, 400 Gbit/s); 100 Gbit/s where there is no such server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from autobalance.devices.device import Device

_GIB = 2**30
# GB/s, one way, 16 lanes: PCI Express base specifications 3.0, 4.0 and 5.0.
_PCIE3, _PCIE4, _PCIE5 = 16.0, 32.0, 64.0
# GB/s of 100, 200 and 400 Gbit/s.
_EDR, _HDR, _NDR = 12.5, 25.0, 50.0


@dataclass(frozen=True)
class GPU:
    """Figures of one kind of GPU.

    Attributes:
        name: the word used in `"4xA100-80GB"`.
        capability: compute capability, which decides between kernels.
        capacity: bytes that a process can use.
        fp32, tf32, bf16, fp16: operations per second.
        bandwidth: bytes per second of its memory.
        link: bytes per second to a neighbour, one way.
        host_link: bytes per second to the host's memory, one way.
        network: bytes per second to another server, one way.
        has_peers: whether it reads its neighbours' memory itself.
        driver_names: what the driver calls it, as `torch.cuda.get_device_name` reports; lower case, a part is enough.
        platform: `"cuda"` or `"hip"`.
    """

    name: str
    capability: tuple[int, int]
    capacity: int
    fp32: float
    tf32: float
    bf16: float
    fp16: float
    bandwidth: float
    link: float
    host_link: float
    network: float
    has_peers: bool
    driver_names: tuple[str, ...]
    platform: Literal["cuda", "hip"] = "cuda"

    @property
    def rates(self) -> tuple[tuple[str, float], ...]:
        """Operations per second by kind of arithmetic.

        Example:
            >>> dict(find_gpu("V100-32GB").rates)["float16"]
            125000000000000.0
        """
        return (("float32", self.fp32), ("tf32", self.tf32), ("bfloat16", self.bf16), ("float16", self.fp16))


def _gpu(
    name: str,
    capability: tuple[int, int],
    gib: float,
    teraflops: tuple[float, float, float, float],
    bandwidth: float,
    link: float,
    host_link: float,
    *driver_names: str,
    network: float = _EDR,
    has_peers: bool = True,
    platform: Literal["cuda", "hip"] = "cuda",
) -> GPU:
    """A row in the units of datasheets: GiB, TFLOPS of fp32, tf32, bf16 and fp16, GB/s."""
    fp32, tf32, bf16, fp16 = (rate * 1e12 for rate in teraflops)
    return GPU(
        name,
        capability,
        int(gib * _GIB),
        fp32,
        tf32,
        bf16,
        fp16,
        bandwidth * 1e9,
        link * 1e9,
        host_link * 1e9,
        network * 1e9,
        has_peers,
        driver_names,
        platform,
    )


GPUS = (
    # NVIDIA Tesla V100 datasheet (SXM2; NVLink 300 GB/s); "15.75 GiB total capacity"
    _gpu("V100-16GB", (7, 0), 15.75, (15.7, 15.7, 15.7, 125), 900, 150, _PCIE3, "v100-sxm2-16gb", "v100-pcie-16gb"),
    # NVIDIA Tesla V100 datasheet (SXM2); "31.74 GiB total capacity"
    _gpu("V100-32GB", (7, 0), 31.74, (15.7, 15.7, 15.7, 125), 900, 150, _PCIE3, "v100-sxm2-32gb", "v100-pcie-32gb"),
    # NVIDIA T4 datasheet (PCIe 3.0); "14.75 GiB"
    _gpu("T4", (7, 5), 14.75, (8.1, 8.1, 8.1, 65), 320, _PCIE3, _PCIE3, "tesla t4"),
    # NVIDIA Turing GPU architecture whitepaper (reference card; PCIe 3.0); "10.73 GiB"
    _gpu("RTX2080Ti", (7, 5), 10.73, (13.4, 13.4, 13.4, 53.8), 616, _PCIE3, _PCIE3, "rtx 2080 ti", has_peers=False),
    # NVIDIA L4 datasheet (PCIe 4.0; its tensor rates with sparsity, halved); label less the driver's share, as for A10
    _gpu("L4", (8, 9), 21.9, (30.3, 60, 121, 121), 300, _PCIE4, _PCIE4, "nvidia l4"),
    # NVIDIA A10 datasheet (PCIe 4.0); label less the 7 % that error correction and the driver keep on such cards
    _gpu("A10", (8, 6), 21.9, (31.2, 62.5, 125, 125), 600, _PCIE4, _PCIE4, "nvidia a10"),
    # NVIDIA A30 datasheet (PCIe 4.0; its NVLink joins two cards); "23.53 GiB"
    _gpu("A30", (8, 0), 23.5, (10.3, 82, 165, 165), 933, _PCIE4, _PCIE4, "nvidia a30"),
    # NVIDIA A40 datasheet (PCIe 4.0; its NVLink joins two cards); "44.34 GiB"
    _gpu("A40", (8, 6), 44.34, (37.4, 74.8, 149.7, 149.7), 696, _PCIE4, _PCIE4, "nvidia a40"),
    # NVIDIA RTX A6000 datasheet (PCIe 4.0; its NVLink joins two cards; tensor rates with sparsity, halved); "47.54 GiB"
    _gpu("A6000", (8, 6), 47.54, (38.7, 77.4, 154.8, 154.8), 768, _PCIE4, _PCIE4, "rtx a6000"),
    # NVIDIA A100 datasheet (SXM4; NVLink 600 GB/s); "39.50 GiB", less a tenth seen between driver versions
    _gpu(
        "A100-40GB",
        (8, 0),
        39.4,
        (19.5, 156, 312, 312),
        1555,
        300,
        _PCIE4,
        "a100-sxm4-40gb",
        "a100-pcie-40gb",
        network=_HDR,
    ),
    # NVIDIA A100 datasheet (SXM4; NVLink 600 GB/s); "79.14 GiB"
    _gpu(
        "A100-80GB",
        (8, 0),
        79.14,
        (19.5, 156, 312, 312),
        2039,
        300,
        _PCIE4,
        "a100-sxm4-80gb",
        "a100 80gb pcie",
        network=_HDR,
    ),
    # NVIDIA L40 datasheet (PCIe 4.0); "44.39 GiB"
    _gpu("L40", (8, 9), 44.39, (90.5, 90.5, 181, 181), 864, _PCIE4, _PCIE4, "nvidia l40"),
    # NVIDIA L40S datasheet (PCIe 4.0; its tensor rates with sparsity, halved); "44.39 GiB"
    _gpu("L40S", (8, 9), 44.39, (91.6, 183, 362, 362), 864, _PCIE4, _PCIE4, "nvidia l40s"),
    # NVIDIA Ampere GA102 whitepaper, appendix A (PCIe 4.0); "23.67 GiB"
    _gpu("RTX3090", (8, 6), 23.67, (35.6, 35.6, 71, 71), 936, _PCIE4, _PCIE4, "rtx 3090", has_peers=False),
    # NVIDIA Ada GPU architecture whitepaper, appendix A (PCIe 4.0); label less 2 %, as the RTX 4090's
    _gpu("RTX4080", (8, 9), 15.6, (48.7, 48.7, 97.5, 97.5), 716.8, _PCIE4, _PCIE4, "rtx 4080", has_peers=False),
    # NVIDIA Ada GPU architecture whitepaper, appendix A (PCIe 4.0); "23.52 GiB"
    _gpu("RTX4090", (8, 9), 23.52, (82.6, 82.6, 165.2, 165.2), 1008, _PCIE4, _PCIE4, "rtx 4090", has_peers=False),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A (PCIe 5.0); "31.36 GiB"
    _gpu("RTX5090", (12, 0), 31.36, (104.8, 104.8, 209.5, 209.5), 1792, _PCIE5, _PCIE5, "rtx 5090", has_peers=False),
    # NVIDIA H100 datasheet (SXM5; NVLink 900 GB/s; tensor rates with sparsity, halved); "79.11 GiB"
    _gpu("H100-80GB", (9, 0), 79.1, (67, 494.5, 989.5, 989.5), 3350, 450, _PCIE5, "h100 80gb hbm3", network=_NDR),
    # NVIDIA H100 datasheet (PCIe 5.0; its NVLink joins two cards; tensor rates with sparsity, halved); as SXM5
    _gpu("H100-PCIe", (9, 0), 79.1, (51.2, 378, 756, 756), 2000, _PCIE5, _PCIE5, "h100 pcie", network=_NDR),
    # NVIDIA H200 datasheet (SXM; NVLink 900 GB/s; tensor rates with sparsity, halved); about 139 GiB seen by a process
    _gpu("H200", (9, 0), 139.0, (67, 494.5, 989.5, 989.5), 4800, 450, _PCIE5, "nvidia h200", network=_NDR),
    # NVIDIA Blackwell architecture technical brief (HGX B200 of 1000 W; NVLink 1.8 TB/s; PCIe 5.0); "178.35 GiB"
    _gpu("B200", (10, 0), 178.35, (80, 1100, 2250, 2250), 8000, 900, _PCIE5, "nvidia b200", network=_NDR),
    # AMD Instinct MI250X datasheet, half of it: each of its two dies is a device (one link of Infinity Fabric, of which
    # ROCm's documentation of the MI250 says 50 GB/s; PCIe 4.0); "63.98 GiB"
    _gpu(
        "MI250X",
        (9, 0),
        63.98,
        (47.9, 47.9, 191.5, 191.5),
        1600,
        50,
        _PCIE4,
        "instinct mi250x",
        network=_HDR,
        platform="hip",
    ),
    # AMD Instinct MI300X datasheet (Infinity Fabric: 128 GB/s to each of seven neighbours; PCIe 5.0); "191.98 GiB"
    _gpu(
        "MI300X",
        (9, 4),
        191.98,
        (163.4, 653.7, 1307.4, 1307.4),
        5300,
        64,
        _PCIE5,
        "instinct mi300x",
        network=_NDR,
        platform="hip",
    ),
)

# Words with only one meaning worth having.
_SHORT = {
    "a100": "A100-80GB",
    "h100": "H100-80GB",
    "v100": "V100-32GB",
    "a10g": "A10",
    "3090": "RTX3090",
    "4080": "RTX4080",
    "4090": "RTX4090",
    "5090": "RTX5090",
    "2080ti": "RTX2080Ti",
    "rtxa6000": "A6000",
}


def find_gpu(word: str) -> GPU | None:
    """The GPU that a word such as `A100-80GB` names, None for a word that names none.

    Example:
        >>> find_gpu("a100-80gb").capacity

    Args:
        word: a name of the table, in any case.
    """
    plain = word.lower().replace("_", "-").replace(" ", "")
    wanted = _SHORT.get(plain, plain).lower()
    return next((gpu for gpu in GPUS if gpu.name.lower() == wanted), None)


def recognise(driver_name: str) -> GPU | None:
    """The GPU that the driver's name for a card stands for, None for a card that the table lacks.

    Example:
        >>> recognise("NVIDIA A100-SXM4-80GB").name
        'A100-80GB'

    Args:
        driver_name: as `torch.cuda.get_device_name` gives it.
    """
    name = driver_name.lower()
    # A number has to end where it does in the driver's name: "nvidia a10" is no "nvidia a100x".
    found = [
        (len(part), gpu) for gpu in GPUS for part in gpu.driver_names if re.search(rf"{re.escape(part)}(?!\d)", name)
    ]
    # The longest part wins: "nvidia l40" is also in "nvidia l40s".
    return max(found, key=lambda pair: pair[0])[1] if found else None


def device_of(gpu: GPU, name: str = "", capacity: int | None = None, node: int = 0, real: bool = False) -> Device:
    """A device of a kind that the table knows.

    Example:
        >>> device_of(find_gpu("H100-80GB")).host_link
        64000000000.0

    Args:
        gpu: its kind.
        name: as tables show it; empty: that of its kind.
        capacity: bytes that it holds; None: what a process can use of such a GPU.
        node: number of its machine.
        real: whether it is present.
    """
    return Device(
        name or gpu.name,
        gpu.capacity if capacity is None else capacity,
        gpu.fp32,
        gpu.bandwidth,
        gpu.link,
        real,
        rates=gpu.rates,
        node=node,
        network=gpu.network,
        host_link=gpu.host_link,
        kind=gpu.name,
        has_peers=gpu.has_peers,
    )
