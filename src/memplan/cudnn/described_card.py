"""Describes a card so that cuDNN can plan for it without the card."""

from __future__ import annotations

from typing import Any

from memplan.devices import Device, hardware_of


def properties(card: Device) -> dict[str, Any]:
    """Return the device properties that cuDNN >= 9.8 reads as JSON. Its error messages name the keys.

    The same properties are in ``dry/sources/cudnn.c``. `backend_worker` adds the version of the driver.

    Raises:
        DeviceError: the catalogue has no L2 cache size or clocks for the card.
    """
    hardware = hardware_of(card, estimated=True)  # clocks change few answers
    version = card.architecture[0] * 100 + card.architecture[1] * 10
    return {
        "cudaDeviceId": 0, "deviceName": card.title, "deviceVer": version, "isTccDriver": 0,
        "l2CacheSize": hardware.l2, "maxCtasPerSM": hardware.blocks, "maxRegistersPerSM": hardware.registers,
        "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": hardware.shared_memory_of_block,
        "maxThreadsPerBlock": 1024, "maxThreadsPerSM": hardware.threads, "memClockRateKHz": hardware.memory_clock,
        "memoryBusWidth": hardware.bus, "multiProcessorCount": card.multiprocessors, "pciDeviceID": 0, "pciDeviceId": 0,
        "regsPerBlock": 65536, "reservedSharedMemoryPerBlock": 1024, "smClockRateKHz": hardware.clock,
        "smCountOrigin": 0, "supportCoopLaunch": 1, "totalGlobalMem": card.capacity, "warpSize": 32,
        "oversizedSharedMemoryPerBlock": 0, "sharedMemoryLimit": hardware.shared_memory_of_block, "smVersion": version,
        "maxBlockSize": [1024, 1024, 64], "maxGridSize": [2147483647, 65535, 65535],
    }  # fmt: skip
