import pytest
import torch

from tropism.objective.advantages import (
    EPSILON,
    component_advantages,
    component_shares,
    group_advantages,
)

NAN = float("nan")


def test_hand_computed_group_scaling():
    # Group (0, 0, 1, 1): mean 1/2, unbiased variance 4 * 0.25 / 3 = 1/3.
    result = group_advantages(torch.tensor([0.0, 0, 1, 1, 2, 2, 2, 2]), group_size=4)
    expected = 0.5 / ((1 / 3) ** 0.5 + EPSILON)
    assert result.values.tolist() == pytest.approx([-expected] * 2 + [expected] * 2 + [0.0] * 4)
    assert result.group_std.tolist() == pytest.approx([(1 / 3) ** 0.5, 0.0])
    assert result.zero_variance.tolist() == [False, True]


def test_scale_none_only_centres():
    result = group_advantages(torch.tensor([0.0, 3.0, 1.0, 1.0]), group_size=2, scale="none")
    assert result.values.tolist() == [-1.5, 1.5, 0.0, 0.0]


def test_equal_rewards_give_exactly_zero():
    # 0.1 * 3 / 3 is not 0.1 in floats: the mean differs from its terms by rounding.
    assert (group_advantages(torch.full((21,), 0.1), group_size=7).values == 0).all()
    rounding = torch.tensor([0.3, 0.1 + 0.2 + 3e-8, 0.3, 0.3])
    assert (group_advantages(rounding, group_size=4).values == 0).all()
    small = torch.tensor([0.0, 1e-3, 0.0, 0.0])
    assert not group_advantages(small, group_size=4).zero_variance.any()


def test_permuting_a_group_permutes_its_advantages():
    rewards, order = torch.rand(8), torch.randperm(8)
    direct = group_advantages(rewards, group_size=8).values
    permuted = group_advantages(rewards[order], group_size=8).values
    torch.testing.assert_close(permuted, direct[order])


def test_groups_do_not_mix():
    rewards = torch.rand(12)
    whole = group_advantages(rewards, group_size=4).values
    alone = torch.cat([group_advantages(part, group_size=4).values for part in rewards.split(4)])
    torch.testing.assert_close(whole, alone, rtol=0, atol=0)


@pytest.mark.parametrize("group_size", [1, 3])
def test_sizes_that_make_no_groups_are_refused(group_size):
    with pytest.raises(ValueError, match=f"group_size={group_size}"):
        group_advantages(torch.rand(4), group_size=group_size)


@pytest.mark.fault(3)
def test_scale_batch_divides_by_the_spread_of_all():
    rewards = torch.tensor([0.0, 1.0, 3.0, 3.0])
    result = group_advantages(rewards, group_size=2, scale="batch")
    expected = 0.5 / (float(rewards.std()) + EPSILON)
    assert result.values.tolist() == pytest.approx([-expected, expected, 0.0, 0.0])
    assert result.zero_variance.tolist() == [False, True]


def test_components_are_normalised_before_they_are_summed():
    # A component in tenths counts as much as one in whole units.
    components = {
        "small": torch.tensor([0.0, 0.1, 0.0, 0.1]),
        "large": torch.tensor([0.0, 1.0, 1.0, 0.0]),
    }
    weights = {"small": 1.0, "large": 1.0}
    values = component_advantages(components, weights=weights, group_size=2).values
    assert values[0] == pytest.approx(-values[1])
    # In the second group the two disagree: they cancel, but for the 1e-4 in each denominator.
    assert values[2:].abs().max() < 2e-3 * values[1]
    only_large = component_advantages(
        components, weights={"small": 0.0, "large": 1.0}, group_size=2
    ).values
    assert only_large.tolist() == pytest.approx([-0.8660, 0.8660, 0.8660, -0.8660], abs=1e-3)


@pytest.mark.fault(9)
def test_component_advantages_equal_trls_formula_with_abstentions():
    torch.manual_seed(0)
    nan = float("nan")
    components = {"a": torch.rand(8), "b": torch.rand(8)}
    components["b"][[1, 6]] = nan
    weights = {"a": 0.7, "b": 2.0}
    total = torch.zeros(8)
    for name, values in components.items():
        groups = values.view(2, 4)
        mean = groups.nanmean(dim=1, keepdim=True)
        std = torch.stack([g[~g.isnan()].std() for g in groups])[:, None]
        total += weights[name] * ((groups - mean) / (std + 1e-4)).nan_to_num(0.0).view(-1)
    expected = (total - total.mean()) / (total.std() + 1e-4)
    found = component_advantages(components, weights=weights, group_size=4).values
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_component_shares_add_up_to_the_advantages(scale):
    components = {
        "a": torch.tensor([0.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]),
        "b": torch.tensor([1.0, 0.0, NAN, 0.2, 0.5, 0.5, 0.5, 0.5]),
    }
    weights = {"a": 2.0, "b": 0.5}
    filled = components["b"].clone()
    filled[2] = 0.4  # the mean of the others in its group
    rewards = 2.0 * components["a"] + 0.5 * filled
    expected = group_advantages(rewards, group_size=4, scale=scale).values
    shares = component_shares(
        components, rewards=rewards, weights=weights, group_size=4, scale=scale
    )
    found = sum(weights[name] * share for name, share in shares.items())
    torch.testing.assert_close(found, expected)
    assert shares["b"][2] == 0
    assert (shares["a"][4:] == 0).all()


def test_component_shares_of_normalised_components_add_up_too():
    components = {
        "a": torch.tensor([0.0, 1.0, 0.5, 0.5]),
        "b": torch.tensor([1.0, 0.0, 0.3, 0.2]),
    }
    weights = {"a": 2.0, "b": 0.5}
    expected = component_advantages(components, weights=weights, group_size=2).values
    shares = component_shares(
        components,
        rewards=torch.zeros(4),
        weights=weights,
        group_size=2,
        aggregation="normalize_then_sum",
    )
    torch.testing.assert_close(2 * shares["a"] + 0.5 * shares["b"], expected)
