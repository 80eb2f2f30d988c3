"""Sums asked of a base model by two examples; right is what it writes first on the line."""

import re


def score(prompt: str, completion: str, *, answer: str) -> dict[str, float]:
    """``near`` falls with the distance from the right sum, ``right`` is the sum itself."""
    number = re.match(r" ?(\d{1,4})(?!\d)", completion)
    if number is None:
        return {"near": 0.0, "right": 0.0}
    distance = abs(int(number[1]) - int(answer))
    return {"near": max(0.0, 1 - distance / 10), "right": float(distance == 0)}
