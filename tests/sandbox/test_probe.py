"""Which sandbox is chosen, and that a weaker one is never taken in silence."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Any

import pytest

from tropism.sandbox import Job, Mode, Sandbox, SandboxError, Value, probe
from tropism.sandbox.probe import choose, layers_of
from tropism.sandbox.slot import Layers, ZygoteError, interpreter

BARE = Layers("zygote")
"""Called a zygote, but with no layer: the self-test must find out."""


def machine(**layers: Layers | str):
    """``layers_of`` of a machine that offers these; a string is why it does not."""

    def offered(mode: Mode) -> Layers:
        found = layers.get(mode, "not here")
        if isinstance(found, str):
            raise ZygoteError(found, True)
        return found

    return offered


def test_this_machine_has_the_strongest() -> None:
    if not probe.landlock_version():
        pytest.skip("the kernel has no Landlock")
    assert choose("auto", interpreter()) == layers_of("zygote")
    assert choose("rlimits", interpreter()) == layers_of("zygote"), "an opt-in is no downgrade"


def test_layers_that_do_not_hold_are_not_taken() -> None:
    with pytest.raises(SandboxError, match=r"zygote: in mode 'zygote' these do not hold: .*'host'"):
        choose("auto", interpreter(), machine(zygote=BARE))


@pytest.mark.parametrize(
    ("missing", "found"),
    [
        ({"seccomp": b""}, "sockets"),
        ({"landlock": 0}, "host"),
        ({"should_drop_uid": False}, "user"),
    ],
)
def test_each_layer_is_missed(missing: dict[str, Any], found: str) -> None:
    if "should_drop_uid" in missing and os.geteuid() != 0:
        pytest.skip("only root drops to another user")
    weaker = replace(layers_of("zygote"), **missing)
    with pytest.raises(SandboxError, match=f"do not hold: .*'{found}'"):
        choose("auto", interpreter(), machine(zygote=weaker))


def test_without_any_the_error_names_setting_reasons_and_remedy() -> None:
    with pytest.raises(SandboxError) as caught:
        choose("auto", interpreter(), machine(zygote="no Landlock", bubblewrap="no bwrap"))
    message = str(caught.value)
    for part in ("sandbox='auto'", "no Landlock", "no bwrap", "install bubblewrap", "'rlimits'"):
        assert part in message


def test_resource_limits_alone_are_taken_only_when_asked_for_and_loudly() -> None:
    offered = machine(zygote="no Landlock", rlimits=layers_of("rlimits"))
    with warnings.catch_warnings(), pytest.raises(SandboxError):
        choose("auto", interpreter(), offered)
    with pytest.warns(RuntimeWarning, match="NOTHING BUT RESOURCE LIMITS.*no Landlock"):
        assert choose("rlimits", interpreter(), offered).mode == "rlimits"


def test_bubblewrap_comes_before_resource_limits() -> None:
    python = "/usr/bin/python3"
    try:
        layers = layers_of("bubblewrap")
    except ZygoteError as error:
        pytest.skip(str(error))
    offered = machine(zygote="no", bubblewrap=layers, rlimits=layers_of("rlimits"))
    assert choose("rlimits", python, offered).mode == "bubblewrap"


def test_the_modes_can_be_read() -> None:
    with pytest.raises(ValueError, match="sandbox='none'"):
        Sandbox("none")  # type: ignore[arg-type]
    found = Sandbox(num_slots=1, layers=layers_of("rlimits"))
    assert found.mode == "rlimits"
    assert found.run(Job("def f(x): return x", "f", ("(1,)",))).results == (Value(1),)
    found.close()


def test_a_machine_of_unknown_numbers_has_no_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ZygoteError, match="numbers of this machine are unknown"):
        layers_of("zygote")
