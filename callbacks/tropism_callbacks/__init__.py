"""Callbacks: the only code that hooks the Trainer, one callback per file."""

from tropism_callbacks.adaptive_lora import AdaptiveLoRA
from tropism_callbacks.adaptive_rewards import AdaptiveRewards
from tropism_callbacks.adaptive_rollouts import AdaptiveRollouts
from tropism_callbacks.alarms import Alarms
from tropism_callbacks.checkpoint import Checkpoint
from tropism_callbacks.evaluation import Evaluation
from tropism_callbacks.kl_drift import KLDrift
from tropism_callbacks.pressure import Pressure
from tropism_callbacks.progress import Progress
from tropism_callbacks.rollout_samples import RolloutSamples
from tropism_callbacks.run_record import RunRecord
from tropism_callbacks.update_norms import UpdateNorms

__all__ = [
    "AdaptiveLoRA",
    "AdaptiveRewards",
    "AdaptiveRollouts",
    "Alarms",
    "Checkpoint",
    "Evaluation",
    "KLDrift",
    "Pressure",
    "Progress",
    "RolloutSamples",
    "RunRecord",
    "UpdateNorms",
]
