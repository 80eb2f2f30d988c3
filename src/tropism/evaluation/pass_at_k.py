"""What several samples of one prompt are worth: pass@k and maj@k, without bias.

pass@k is the chance that at least one of k samples is right, maj@k that the most frequent answer of
k samples is. Both are per prompt; means and intervals over prompts are ``statistics``'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased pass@k of one prompt, from n samples of which c are right.

    1 - C(n - c, k) / C(n, k), multiplied out so that nothing overflows (Chen et al. 2021,
    2107.03374, section 2.1). For k = 1 it is the mean, c / n.

    Raises:
        ValueError: k is not in 1..n, or c not in 0..n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_correct} right among {num_samples}: give 1 <= k <= num_samples and "
            "0 <= num_correct <= num_samples."
        )
    if num_samples - num_correct < k:
        return 1.0
    rest = np.arange(num_samples - num_correct + 1, num_samples + 1)
    return float(1.0 - np.prod(1.0 - k / rest))


def maj_at_k(answers: Sequence[str | None], verdicts: Sequence[float], k: int) -> float:
    """Chance that a vote of k samples is right, over the n // k disjoint blocks of k samples.

    Each block is k independent samples, so their mean is unbiased; samples beyond the last whole
    block are not used. Answers with most votes are each chosen with equal chance. What answers
    nothing has no vote, and a block without any vote is wrong.

    Args:
        answers: [n] what each sample answers; equal answers are equal strings.
        verdicts: [n] in [0, 1]; where equal answers differ (in form, say) an answer is worth the
            mean of its samples in the block.
        k: Voters.

    Raises:
        ValueError: k is not in 1..n, or the lengths differ.
    """
    if len(answers) != len(verdicts) or not 1 <= k <= len(answers):
        raise ValueError(
            f"maj@{k} of {len(answers)} answers and {len(verdicts)} verdicts: give as many of one "
            "as of the other, and 1 <= k <= their number."
        )
    starts = range(0, len(answers) - k + 1, k)
    votes = [_vote(answers[i : i + k], verdicts[i : i + k]) for i in starts]
    return sum(votes) / len(votes)


def _vote(answers: Sequence[str | None], verdicts: Sequence[float]) -> float:
    count = Counter(answer for answer in answers if answer is not None)
    most = max(count.values(), default=0)
    winners = [answer for answer, votes in count.items() if votes == most]
    worth = [
        sum(v for answer, v in zip(answers, verdicts, strict=True) if answer == winner) / most
        for winner in winners
    ]
    return sum(worth) / len(worth) if worth else 0.0
