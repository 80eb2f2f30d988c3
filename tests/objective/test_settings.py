import pytest

from tropism.objective.settings import Objective


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_low": 1.0}, "clip_low=1.0"),
        ({"beta": -0.1}, "beta=-0.1"),
        ({"num_iterations": 0}, "num_iterations=0"),
        ({"dual_clip": 1.1}, "dual_clip=1.1"),
        ({"reference_every": 5}, "reference_every=5 with beta=0"),
        ({"entropy_top_fraction": 0.0}, r"entropy_top_fraction=0\.0"),
        ({"aggregation": "normalize_then_sum", "scale": "none"}, "scale='none'"),
        ({"mismatch_range": (2.0, 1.0)}, r"mismatch_range=\[2\.0, 1\.0\]"),
        ({"overlong_buffer": 0}, "overlong_buffer=0"),
        ({"max_resamples": -1}, "max_resamples=-1"),
    ],
)
def test_combinations_that_cannot_work_say_why(settings, message):
    with pytest.raises(ValueError, match=message):
        Objective(**settings)
