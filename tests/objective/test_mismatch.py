import pytest
import torch

from tropism.objective.mismatch import mismatch_weights

MASK = torch.tensor([[True, True, False], [True, True, True]])
# Token ratios 2, 0.5, (masked); 1, 1, 4. Sequence ratios 1 and 4.
OLD = torch.tensor([[2.0, 0.5, 9.0], [1.0, 1.0, 4.0]]).log()


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("none", [[1, 1], [1, 1, 1]]),
        ("token_truncate", [[2, 0.8], [1, 1, 3]]),
        ("token_mask", [[2, 0], [1, 1, 0]]),
        ("sequence_truncate", [[1, 1], [3, 3, 3]]),
        ("sequence_mask", [[1, 1], [0, 0, 0]]),
    ],
)
def test_by_hand(correction, expected):
    found = mismatch_weights(
        OLD,
        sampler_logprobs=torch.zeros(2, 3),
        mask=MASK,
        correction=correction,
        low=0.8,
        high=3.0,
    )
    ratios = [[1, 1], [4, 4, 4]] if "sequence" in correction else [[2, 0.5], [1, 1, 4]]
    for row, values in enumerate(expected):
        assert found.weights[row, : len(values)].tolist() == pytest.approx(values)
        assert found.ratio[row, : len(values)].tolist() == pytest.approx(ratios[row])
    corrected = found.is_corrected[MASK].tolist()
    if correction == "none":
        assert not any(corrected)
    else:
        assert corrected == [not 0.8 <= ratio <= 3 for row in ratios for ratio in row]


def test_no_gradient_flows_through_the_weights():
    old = OLD.clone().requires_grad_()
    found = mismatch_weights(
        old, sampler_logprobs=torch.zeros(2, 3), mask=MASK, correction="token_mask", low=None,
        high=None,
    )  # fmt: skip
    assert not found.weights.requires_grad
