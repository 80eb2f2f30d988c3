"""An optimizer's state by parameter name and shape, never by position.

torch numbers parameters by their position in the groups and loads moments by number: an optimizer
that was built in another order takes layer 0's moments for layer 1 without a word wherever shapes
agree. Names do not move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Any]


def load_by_name(optimizer: torch.optim.Optimizer) -> None:
    """Make ``optimizer.load_state_dict`` go by name from now on, whatever order it was saved in.

    Both optimizers must know their parameters' names: torch does where it is given
    ``(name, parameter)`` pairs. Settings (learning rate, betas, ...) come from the saved group of
    each name. Parameters without moments (they never trained) stay without. Call it before anything
    is loaded: torch's own loading also takes over the saved names.

    Raises:
        ValueError: This optimizer has no names. On loading: the saved one has none, a parameter is
            missing or unknown, has moments of another shape, or shares a group with parameters
            that were saved with other settings.
    """
    _own_names(optimizer)  # refuses now rather than when it is too late
    optimizer.register_load_state_dict_pre_hook(_reordered)


def state_by_name(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, State]:
    """A copy of the moments of ``named`` parameters; {} for one that has none."""
    held = _held(optimizer)
    for name, parameter in named.items():
        if id(parameter) not in held:
            raise ValueError(f"the optimizer does not hold {name!r}: build it with AdamW.build.")
    return {
        name: {key: _copied(value) for key, value in optimizer.state.get(parameter, {}).items()}
        for name, parameter in named.items()
    }


def load_state_by_name(
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, nn.Parameter],
    states: Mapping[str, State],
) -> None:
    """Put moments that ``state_by_name`` gave back, over what is there now.

    Raises:
        ValueError: A parameter is missing or unknown, or has moments of another shape. Nothing
            was loaded.
    """
    _same_names(named.keys(), states.keys())
    held = _held(optimizer)
    for name, parameter in named.items():
        if id(parameter) not in held:
            raise ValueError(f"the optimizer does not hold {name!r}: build it with AdamW.build.")
        _check_shapes(name, parameter, states[name])
    for name, parameter in named.items():
        if states[name]:
            optimizer.state[parameter] = {
                key: _copied(value, like=parameter) for key, value in states[name].items()
            }
        else:
            optimizer.state.pop(parameter, None)


def _reordered(optimizer: torch.optim.Optimizer, saved: State) -> State:
    """The saved state dict, numbered and grouped as ``optimizer`` is."""
    names = _own_names(optimizer)
    numbers: dict[str, Any] = {}
    settings: dict[str, State] = {}
    for group in saved["param_groups"]:
        if "param_names" not in group:
            raise ValueError(
                "the saved optimizer state has no parameter names, so that nothing says whose "
                "moments are whose: it was written by another version. Start the run again."
            )
        of_group = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for name, number in zip(group["param_names"], group["params"], strict=True):
            numbers[name], settings[name] = number, of_group
    _same_names({name for group in names for name in group}, numbers.keys())
    state, groups, position = {}, [], 0
    for own, group in zip(names, optimizer.param_groups, strict=True):
        numbered = list(range(position, position + len(own)))
        position += len(own)
        for number, name, parameter in zip(numbered, own, group["params"], strict=True):
            if settings[name] != settings[own[0]]:
                raise ValueError(
                    f"the saved optimizer has other settings for {name!r} than for {own[0]!r}, "
                    "which are one group here: they cannot both be kept."
                )
            if numbers[name] in saved["state"]:
                moments = saved["state"][numbers[name]]
                _check_shapes(name, parameter, moments)
                state[number] = moments
        groups.append({**settings[own[0]], "params": numbered, "param_names": list(own)})
    return {**saved, "state": state, "param_groups": groups}


def _own_names(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    if not all("param_names" in group for group in optimizer.param_groups):
        raise ValueError(
            "the optimizer does not know its parameters' names: give it (name, parameter) pairs."
        )
    return [group["param_names"] for group in optimizer.param_groups]


def _held(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _same_names(own: Any, saved: Any) -> None:
    if missing := sorted(set(own) - set(saved)):
        raise ValueError(
            f"the saved optimizer state lacks {missing[0]!r} ({len(missing)} parameters in all): "
            "it is of another model or other adapters."
        )
    if unknown := sorted(set(saved) - set(own)):
        raise ValueError(
            f"the saved optimizer state has {unknown[0]!r} ({len(unknown)} parameters in all), "
            "which this run does not train: it is of another model or other adapters."
        )


def _check_shapes(name: str, parameter: Tensor, moments: State) -> None:
    for key, value in moments.items():
        if isinstance(value, Tensor) and value.ndim > 0 and value.shape != parameter.shape:
            raise ValueError(
                f"the saved {key} of {name!r} has shape {list(value.shape)}, the parameter "
                f"{list(parameter.shape)}: it is of another model or another lora.rank."
            )


def _copied(value: Any, like: Tensor | None = None) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone()
    return copy.to(like.device) if like is not None and copy.ndim > 0 else copy
