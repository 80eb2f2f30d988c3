"""Policies that decide what each reward component weighs."""

from tropism.adaptation.rewards.fixed import GDPO, Fixed
from tropism.adaptation.rewards.gradient_share import GradientShare
from tropism.adaptation.rewards.saturation import SaturationDecay
from tropism.adaptation.rewards.variation import SAW

__all__ = ["GDPO", "SAW", "Fixed", "GradientShare", "SaturationDecay"]
