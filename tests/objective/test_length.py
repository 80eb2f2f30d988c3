import torch

from tropism.objective.length import soft_overlong


def test_by_hand():
    lengths = torch.tensor([10, 80, 85, 90, 100])
    penalty = soft_overlong(lengths, max_completion_length=100, buffer=20)
    torch.testing.assert_close(penalty, torch.tensor([0.0, 0.0, -0.25, -0.5, -1.0]))
