"""The models of a suite: the base, and what was made of it, shown in its place one by one.

All are the same network with other weights, so that one copy of it is loaded, without adapters,
and one engine bound. An adapter is merged as the sampler merges it in training: in fp32, cast once.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tropism.lora.export import CONFIG_FILE, PREFIX, load_adapter_tensors
from tropism.lora.views import View
from tropism.models import Model
from tropism.policy import ADAPTER, Policy
from tropism.weights import sha256_of

NETWORK = "network."  # what Lightning puts before a parameter's name
Weights = Iterator[tuple[nn.Parameter, Tensor]]


@dataclass(frozen=True)
class Contestant(ABC):
    """A model under test.

    Args:
        name: In records and tables.
        path: Its file or folder; None for the base as it is.
        rollout: Rollouts that it was trained for, 0 where that is not known.
        step: Optimizer steps, the same.
    """

    name: str
    path: Path | None
    rollout: int = 0
    step: int = 0

    @abstractmethod
    def weights(self, policy: Policy) -> Weights:
        """Parameters of the base network that differ, with their values."""

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of each file that the weights are in."""
        if self.path is None:
            return {}
        if self.path.is_file():
            return {self.path.name: sha256_of(self.path)}
        files = sorted([*self.path.glob("*.safetensors"), *self.path.glob("*.bin")])
        files += [file for file in sorted(self.path.glob("*config.json")) if file.is_file()]
        return {file.name: sha256_of(file) for file in files}

    @contextmanager
    def shown(self, policy: Policy) -> Iterator[None]:
        """The network has this model's weights while inside."""
        with View() as view, torch.no_grad():
            for parameter, value in self.weights(policy):
                view.show(parameter, value.to(parameter.dtype))
            yield


class Base(Contestant):
    """The network as it was loaded."""

    def weights(self, policy: Policy) -> Weights:
        return iter(())


class TunedAdapter(Contestant):
    """A folder with a LoRA adapter, of this project or any stock PEFT one."""

    def weights(self, policy: Policy) -> Weights:
        _, tensors = load_adapter_tensors(str(self.path))
        for name, (a, b, scaling) in tensors.items():
            yield _merged(policy, name, a, b, scaling, str(self.path))


class TunedModel(Contestant):
    """A folder with the whole model, as full-parameter training writes it."""

    def weights(self, policy: Policy) -> Weights:
        from transformers import AutoModelForCausalLM

        tuned = AutoModelForCausalLM.from_pretrained(str(self.path), dtype=torch.float32)
        return _same_parameters(policy, dict(tuned.named_parameters()), str(self.path))


class Checkpoint(Contestant):
    """A ``.ckpt`` file of a run, with LoRA of any rank or with all weights."""

    def weights(self, policy: Policy) -> Weights:
        content = _read(self.path)
        state: dict[str, Tensor] = {
            name.removeprefix(NETWORK): value for name, value in content["state_dict"].items()
        }
        lora = content["hyper_parameters"]["lora"]
        if lora is None:
            return _same_parameters(policy, state, str(self.path))
        return self._adapted(policy, state, lora["alpha"] / lora["rank"])

    def _adapted(self, policy: Policy, state: dict[str, Tensor], scaling: float) -> Weights:
        end = f".lora_A.{ADAPTER}.weight"
        for key, a in state.items():
            if key.endswith(end):
                b = state[key.replace(".lora_A.", ".lora_B.")]
                name = key.removeprefix(PREFIX).removesuffix(end)
                yield _merged(policy, name, a, b, scaling, str(self.path))


def _merged(
    policy: Policy, name: str, a: Tensor, b: Tensor, scaling: float, path: str
) -> tuple[nn.Parameter, Tensor]:
    """The weight of one linear, and W_0 + scaling * b @ a."""
    linear = next((policy.linear(site) for site in policy.sites if site.name == name), None)
    if linear is None:
        raise ValueError(f"{path} adapts {name!r}, which the model lacks: another base model?")
    weight = linear.get_parameter("weight")
    a, b = (side.to(weight.device, torch.float32) for side in (a, b))
    if not isinstance(linear, nn.Linear):  # GPT-2 keeps its weights as [d_in, d_out]
        a, b = b.T, a.T
    if weight.shape != (b.shape[0], a.shape[1]):
        raise ValueError(
            f"{path}: the update of {name!r} is {b.shape[0]} x {a.shape[1]}, the model's weight "
            f"{tuple(weight.shape)}: another base model?"
        )
    return weight, torch.addmm(weight.data.float(), b, a, alpha=scaling)


def _same_parameters(policy: Policy, given: dict[str, Any], path: str) -> Weights:
    own = dict(policy.base.named_parameters())
    differing = sorted(
        name
        for name in own.keys() | given.keys()
        if name not in own or name not in given or own[name].shape != given[name].shape
    )
    if differing:
        raise ValueError(
            f"{path} is of another network: {len(differing)} tensors are missing, unknown or of "
            f"another shape, the first {differing[0]!r}. Set model.name to its base model."
        )
    return ((parameter, given[name].detach()) for name, parameter in own.items())


# -- finding them ---------------------------------------------------------------------------------


def contestants(model: Model, checkpoints: Sequence[str], *, base: bool) -> list[Contestant]:
    """The models that are to be evaluated, the base first; reads no weights into memory.

    Raises:
        ValueError: None at all, one twice, a path that is no model, or a checkpoint of another one.
    """
    paths = [Path(path).expanduser() for path in checkpoints]
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"--ckpt_path and suite.checkpoints: {checkpoints} names one model twice.")
    found = [base_of(model)] if base else []
    for name, path in zip(_short_names(paths), paths, strict=True):
        found.append(_contestant(name, path, model))
    if not found:
        raise ValueError("suite.base=false and no checkpoint: there is no model to test.")
    return found


def base_of(model: Model) -> Contestant:
    """What the config's training starts from: its model, or the adapter on it."""
    if model.adapter is None:
        return Base("base", None)
    start = _contestant("base", Path(model.adapter), model)
    if not isinstance(start, TunedAdapter):
        raise ValueError(f"model.adapter={model.adapter!r}: no LoRA adapter there.")
    return TunedAdapter("base", start.path)


def _contestant(name: str, path: Path, model: Model) -> Contestant:
    if path.is_file():
        return _checkpoint(name, path, model)
    if (path / "run.json").is_file():
        rollout = _rollouts(path)
        if (path / "adapter").is_dir():
            return TunedAdapter(name, path / "adapter", rollout)
        if (path / "model").is_dir():
            return TunedModel(name, path / "model", rollout)
        if (path / "checkpoints" / "last.ckpt").is_file():
            return _checkpoint(name, path / "checkpoints" / "last.ckpt", model)
    if (path / CONFIG_FILE).is_file():
        return TunedAdapter(name, path, _rollouts(path.parent))
    if (path / "config.json").is_file():
        return TunedModel(name, path, _rollouts(path.parent))
    raise ValueError(
        f"checkpoint {str(path)!r}: give a .ckpt file, the folder of a LoRA adapter or of a model, "
        "or a run folder (runs/NAME/version_N) with one of them; nothing of that is there."
    )


def _checkpoint(name: str, path: Path, model: Model) -> Checkpoint:
    content = _read(path)
    trained_on = content["hyper_parameters"]["model"]["name"]
    if trained_on != model.name:
        raise ValueError(
            f"checkpoint {str(path)!r} is of model.name={trained_on!r}, the config has "
            f"{model.name!r}: test it with the config of its run (config.yaml in its folder)."
        )
    return Checkpoint(name, path, content["tropism"]["rollout"], content["global_step"])


def _read(path: Path | None) -> dict[str, Any]:
    """A checkpoint, its tensors left on the disk until they are used."""
    from pickle import UnpicklingError

    problem = f"checkpoint {str(path)!r} is no checkpoint of `tropism fit`"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # type: ignore[arg-type]
    except (UnpicklingError, RuntimeError) as error:
        raise ValueError(f"{problem}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{problem}: it holds a {type(content).__name__}.")
    if missing := sorted({"tropism", "state_dict", "hyper_parameters"} - content.keys()):
        raise ValueError(f"{problem}: it has no {', '.join(missing)} in it.")
    return content


def _rollouts(run: Path) -> int:
    file = run / "run.json"
    if not file.is_file():
        return 0
    summary = json.loads(file.read_text(encoding="utf-8")).get("summary", {})
    return int(summary.get("rollouts") or 0)


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart; not ``base``, which is taken."""
    most = max((len(path.parts) for path in paths), default=1)
    for num in range(1, most + 1):
        names = ["/".join(path.parts[-num:]) for path in paths]
        if len(set(names)) == len(names) and "base" not in names:
            return names
    return [str(path.absolute()) for path in paths]
