"""The description of a card that cuDNN reads in the place of a real one."""

from __future__ import annotations

from typing import Any

from memplan.devices import Device, hardware_of


def properties(card: Device) -> dict[str, Any]:
    """Return a card as the properties of a device that cuDNN >= 9.8 reads as JSON; its error messages name the keys.

    The same as in ``dry/sources/cudnn.c``. The version of the driver is added where the library is loaded.

    Raises:
        DeviceError: a card whose L2 cache or speeds are not in the catalogue.
    """
    known = hardware_of(card, estimated=True)  # clocks change few answers
    version = card.architecture[0] * 100 + card.architecture[1] * 10
    return {
        "cudaDeviceId": 0, "deviceName": card.title, "deviceVer": version, "isTccDriver": 0,
        "l2CacheSize": known.l2, "maxCtasPerSM": known.blocks, "maxRegistersPerSM": known.registers,
        "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": known.shared_memory_of_block,
        "maxThreadsPerBlock": 1024, "maxThreadsPerSM": known.threads, "memClockRateKHz": known.memory_clock,
        "memoryBusWidth": known.bus, "multiProcessorCount": card.multiprocessors, "pciDeviceID": 0, "pciDeviceId": 0,
        "regsPerBlock": 65536, "reservedSharedMemoryPerBlock": 1024, "smClockRateKHz": known.clock,
        "smCountOrigin": 0, "supportCoopLaunch": 1, "totalGlobalMem": card.capacity, "warpSize": 32,
        "oversizedSharedMemoryPerBlock": 0, "sharedMemoryLimit": known.shared_memory_of_block, "smVersion": version,
        "maxBlockSize": [1024, 1024, 64], "maxGridSize": [2147483647, 65535, 65535],
    }  # fmt: skip
