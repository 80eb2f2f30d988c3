import torch

from tropism.rollouts.random_streams import draw, uniforms


def stream(**changed):
    key = {"seed": 1, "rollout": 2, "prompt_id": "p", "sample": 3, "num": 5} | changed
    return uniforms(**key)


def test_streams_depend_on_every_part_of_their_key_and_on_nothing_else():
    assert torch.equal(stream(), stream())
    for change in ({"seed": 9}, {"rollout": 9}, {"prompt_id": "q"}, {"sample": 9}):
        assert not torch.equal(stream(), stream(**change))
    assert torch.equal(stream(num=3), stream()[:3])


def test_draw_inverts_the_distribution():
    probabilities = torch.tensor([0.2, 0.0, 0.5, 0.3])
    uniform = torch.tensor([0.0, 0.19, 0.2, 0.69, 0.71, 0.9999999])
    tokens = draw(probabilities.log().expand(6, 4), uniform)
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3]


def test_draw_has_the_right_frequencies():
    torch.manual_seed(0)
    logprobs = torch.randn(50).log_softmax(-1)
    uniform = uniforms(seed=0, rollout=0, prompt_id="x", sample=0, num=200_000)
    counts = torch.bincount(draw(logprobs.expand(len(uniform), 50), uniform), minlength=50)
    expected = logprobs.exp() * len(uniform)
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 90  # 49 degrees of freedom: p < 0.001 above 85
