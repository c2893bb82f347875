"""Colours told apart by eyes that see fewer of them: simulated, and measured in CIELAB."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from memplan.reports.html.palette import LOOKS, THEMES

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009),
# severity 1.0, on linear RGB.
EYES = {
    "all colours": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
APART = 10
"""Distance in CIELAB at which two fields beside each other are told apart at a glance."""


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(colour: str, eye: str) -> np.ndarray:
    """CIELAB under D65 of what an eye sees of a colour."""
    seen = np.clip(np.array(EYES[eye]) @ linear(colour), 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    ratio = np.array(to_xyz) @ seen / [0.9505, 1.0, 1.089]
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eye", EYES)
def test_causes_differ_by_colour_or_by_pattern(eye: str) -> None:
    near = [
        (one, other)
        for (one, look), (other, second) in combinations(LOOKS.items(), 2)
        if look.pattern == second.pattern and np.linalg.norm(lab(look.colour, eye) - lab(second.colour, eye)) < APART
    ]
    assert near == []


def test_the_distance_is_one_that_colours_can_fail() -> None:
    """Red and green of the same lightness are far apart, and near for an eye without one of the cones."""
    red, green = "#c05000", "#7a7a00"
    assert np.linalg.norm(lab(red, "all colours") - lab(green, "all colours")) > 40
    assert np.linalg.norm(lab(red, "protanopia") - lab(green, "protanopia")) < 2 * APART


def luminance(colour: str) -> float:
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("theme", THEMES)
def test_texts_stand_out_from_their_background(theme: str) -> None:
    """WCAG 2.2, 1.4.3: a contrast of 4.5 to 1."""
    back, *texts = THEMES[theme].values()
    for text in texts:
        light, dark = sorted((luminance(back), luminance(text)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, text
