"""Training and inference steps to measure predictions against.

`ZOO` maps a name to a `build`: it makes model, data and optimizer and returns `step`, which runs one step.
Each really runs two steps within about 10 s on two CPU cores and peaks between 50 MB and 1.5 GB: a smaller
one would be mostly noise, a larger one slow to check.
"""

from . import generative, language, optimizers, sequences, steps, vision, volumes
from .registry import ZOO, Build, Step

__all__ = [
    "ZOO",
    "Build",
    "Step",
    "generative",
    "language",
    "optimizers",
    "sequences",
    "steps",
    "vision",
    "volumes",
]
