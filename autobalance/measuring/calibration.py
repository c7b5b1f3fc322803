"""What a device really takes and does, measured once and kept in the user's cache directory.

calibrate(devices: Sequence[str] | None = None, force: bool = False) -> tuple[Calibration, ...]
known_calibration(device: str) -> Calibration | None
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autobalance.saved import load, save

ENVIRONMENT_VARIABLE = "AUTOBALANCE_CACHE"


@dataclass(frozen=True)
class Identity:
    """What a calibration holds for.

    Example:
        >>> Identity("NVIDIA A100-SXM4-80GB", driver="12.4", torch="2.13.0", autobalance="0.1.0")

    Attributes:
        name: of the kind of device, as the driver calls it.
        driver: its version.
        torch, autobalance: versions.
    """

    name: str
    driver: str
    torch: str
    autobalance: str


@dataclass(frozen=True)
class Calibration:
    """What was measured on a kind of device.

    Example:
        >>> Calibration(identity, context=450 * 2**20, flops={"float32": 1.8e13}, bandwidth=1.3e12)

    Attributes:
        identity: what it holds for.
        context: bytes that a process takes on the device beside its tensors: context, kernels, libraries.
        workspaces: bytes that libraries keep in the allocator from their first use on.
        flops: operations per second of large matrix products by type: "float32", "tf32", "bfloat16", "float16".
        bandwidth: bytes per second between its memory and its cores.
        launch_time: seconds until the host can launch the next kernel.
        links: bytes per second from one device of this machine to another, by "0>1".
        efficiency: share of the roofline's speed that blocks of a class reach, by class name.
    """

    identity: Identity
    context: int = 0
    workspaces: int = 0
    flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float = 0.0
    launch_time: float = 0.0
    links: Mapping[str, float] = field(default_factory=dict)
    efficiency: Mapping[str, float] = field(default_factory=dict)


def cache_directory() -> Path:
    """Where calibrations are kept: `AUTOBALANCE_CACHE`, else the user's cache directory.

    Example:
        >>> cache_directory()
        PosixPath('/home/me/.cache/autobalance')
    """
    own = os.environ.get(ENVIRONMENT_VARIABLE)
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "autobalance"


def calibrate(devices: Sequence[str] | None = None, force: bool = False) -> tuple[Calibration, ...]:
    """Measure devices, one of each kind, and the links between all of them; about a minute for real GPUs.

    Example:
        >>> calibrate(["cuda:0", "cuda:1"])                                      # doctest: +SKIP

    Args:
        devices: names as torch has them; None: all GPUs of this machine.
        force: whether to measure again what is known.

    Returns:
        One calibration per device.

    Raises:
        ValueError: a device is not there.
    """
    from autobalance.measuring.probe import identity_of, present_devices, probe, probe_links

    names = list(devices) if devices is not None else present_devices()
    identities = [identity_of(name) for name in names]
    found: dict[Identity, Calibration] = {}
    for name, identity in zip(names, identities, strict=True):
        if identity not in found:  # devices of one kind are alike
            known = None if force else read_calibration(identity)
            found[identity] = known or probe(name, identity)
    links = probe_links(names)
    for identity, calibration in found.items():
        own = {pair: rate for (source, pair), rate in links.items() if identities[source] == identity}
        found[identity] = replace(calibration, links={**calibration.links, **own})
        write_calibration(found[identity])
    return tuple(found[identity] for identity in identities)


def known_calibration(device: str) -> Calibration | None:
    """What was measured on devices like this one, by this torch and this autobalance; None if nothing was.

    Example:
        >>> known_calibration("cuda:0")                                          # doctest: +SKIP

    Args:
        device: as torch names it.

    Raises:
        ValueError: the device is not there.
    """
    from autobalance.measuring.probe import identity_of

    return read_calibration(identity_of(device))


def read_calibration(identity: Identity) -> Calibration | None:
    """The kept calibration, None where there is none; one that is damaged is passed over with a warning.

    Args:
        identity: what it has to hold for.
    """
    path = _path(identity)
    try:
        found = load(path, "calibration", Calibration)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.warn(f"the calibration of {identity.name} is passed over: {error}", stacklevel=2)
        return None
    if found.identity != identity:
        warnings.warn(f"{path} is passed over: it is the calibration of another device, {found.identity}", stacklevel=2)
        return None
    return found


def write_calibration(calibration: Calibration) -> None:
    """Keep a calibration; where the directory cannot be written to, a warning says that it is lost.

    Args:
        calibration: is found again under its identity.
    """
    path = _path(calibration.identity)
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(beside, "calibration", calibration, indent=2)
        beside.replace(path)  # at once: another process never reads half a file
    except OSError as error:
        warnings.warn(
            f"the calibration of {calibration.identity.name} cannot be kept: {error}. Set {ENVIRONMENT_VARIABLE} to a "
            f"directory that can be written to",
            stacklevel=2,
        )


def _path(identity: Identity) -> Path:
    """One file for each identity: its name for people, and a digest of all of it."""
    words = (identity.name, identity.driver, identity.torch, identity.autobalance)
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]
    readable = re.sub(r"[^a-z0-9]+", "-", identity.name.lower()).strip("-")
    return cache_directory() / f"calibration-{readable}-{digest}.json"
