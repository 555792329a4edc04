"""The GPUs that NVML lists, and which of them CUDA shows."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pynvml


@dataclass(frozen=True)
class Device:
    """One GPU or MIG instance as NVML shows it; `handle` is NVML's own."""

    uuid: str
    name: str
    handle: object = None


def nvml_devices() -> list[Device]:
    """Every GPU in NVML's order (by PCI bus), each followed by its MIG instances. Raises pynvml.NVMLError."""
    pynvml.nvmlInit()
    devices = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        # A GPU that this container may not open is not counted by CUDA either.
        with contextlib.suppress(pynvml.NVMLError_NoPermission):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            for handle in (gpu, *_mig_handles(gpu)):
                devices.append(Device(pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle), handle))
    return devices


def _mig_handles(gpu: object) -> Iterator[object]:
    with contextlib.suppress(pynvml.NVMLError):  # most GPUs know no MIG
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            with contextlib.suppress(pynvml.NVMLError_NotFound):  # an unused slot
                yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)


def by_uuid(text: str, devices: Sequence[Device]) -> Device | None:
    """The one device whose UUID starts with `text`, with or without its GPU- or MIG-; None if none or several do."""
    text = text.lower()
    found = [d for d in devices if text and (d.uuid.lower().startswith(text) or d.uuid[4:].lower().startswith(text))]
    return found[0] if len(found) == 1 else None


def visible_devices(devices: Sequence[Device], visible: str | None) -> list[Device]:
    """The devices that CUDA shows under CUDA_VISIBLE_DEVICES=`visible` (None: not set), in CUDA's order."""
    gpus = [d for d in devices if not d.uuid.startswith("MIG-")]
    if visible is None:
        return gpus
    chosen = []
    for entry in (text.strip() for text in visible.split(",")):
        if entry.isdigit():
            device = gpus[int(entry)] if int(entry) < len(gpus) else None
        else:
            device = by_uuid(entry, devices)
        if device is None:  # CUDA stops at the first entry that it cannot resolve, -1 among them
            break
        chosen.append(device)
    return chosen
