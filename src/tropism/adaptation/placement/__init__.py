"""Policies that decide where LoRA trains, with what rank and what step size."""

from tropism.adaptation.placement.budget import TopBudget
from tropism.adaptation.placement.controls import OneShot, Shuffled, SwitchOnly
from tropism.adaptation.placement.depth import Depth
from tropism.adaptation.placement.gain_steps import GainSteps
from tropism.adaptation.placement.recorded import Replay
from tropism.adaptation.placement.rotate import Rotate
from tropism.adaptation.placement.sensitivity import Sensitivity
from tropism.adaptation.placement.shrink import SignalShrink
from tropism.adaptation.placement.static import Static, Uniform

__all__ = [
    "Depth",
    "GainSteps",
    "OneShot",
    "Replay",
    "Rotate",
    "Sensitivity",
    "Shuffled",
    "SignalShrink",
    "Static",
    "SwitchOnly",
    "TopBudget",
    "Uniform",
]
