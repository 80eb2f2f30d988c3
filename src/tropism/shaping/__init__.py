"""Rewards that any task can carry besides its own: ``model.init_args.extra_rewards`` of a config.

    extra_rewards:
      - {class_path: tropism.shaping.Repetition}
      - {class_path: tropism.shaping.Length, init_args: {minimum: 40, maximum: 200, falloff: 100}}
    reward_weights: {accuracy: 1.0, repetition: 0.1, length: 0.1}

Your own: a subclass of ``tropism.tasks.extra.ExtraReward``, by its dotted path.
"""

from tropism.shaping.length import Length, SoftOverlong
from tropism.shaping.repetition import Repetition
from tropism.shaping.reward_model import RewardModel
from tropism.shaping.tags import Format, TagCount

__all__ = ["Format", "Length", "Repetition", "RewardModel", "SoftOverlong", "TagCount"]
