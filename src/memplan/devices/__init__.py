"""The catalogue of cards: facts only, each with its source."""

from __future__ import annotations

from memplan.devices.hardware import Hardware, described, hardware_of
from memplan.devices.lookup import catalogue, find, of_properties, read_budget
from memplan.devices.model import Device
