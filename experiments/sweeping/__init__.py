"""Sweeps: many runs of one study, resumed where they stopped. The command is experiments/sweep.py.

from experiments.sweeping import index, results       in a study's script, from the repository:
                                                      python -m experiments.STUDY.SCRIPT
"""

from .running import Runner
from .state import State, index, open_sweep, results

__all__ = ["Runner", "State", "index", "open_sweep", "results"]
