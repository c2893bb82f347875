"""The catalogue of cards: facts only, each with its source."""

from __future__ import annotations

from memplan.devices.hardware import Hardware, described_cards, hardware_of
from memplan.devices.lookup import catalogue, device_of_properties, find, read_budget
from memplan.devices.model import Device
