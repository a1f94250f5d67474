"""The routers that can be simulated, by name: the project's policies and what others do."""

from collections.abc import Mapping
from dataclasses import replace

from vertumnus_router.core.config import POLICIES, PolicyConfig
from vertumnus_router.core.control import ControlPlane
from vertumnus_router.core.model import CorrectionConfig
from vertumnus_router.core.profile import Profile

from vertumnus_sim.baselines import BASELINES, make_baseline
from vertumnus_sim.scenario import Hardware, ScenarioError
from vertumnus_sim.settings import apply, names
from vertumnus_sim.simulation import Router

#: A router that turns requests away looks faster than it is.
_UNLIMITED = 10**9

OURS = POLICIES
NAMES = (*OURS, *BASELINES)


def make_router(
    name: str, settings: Mapping[str, str], profile: Profile, hardware: Hardware, seed: int
) -> Router:
    """The router ``name`` with its settings, before any event.

    Raises ``ValueError`` for a name or a setting that is not there.
    """
    if name in BASELINES:
        return make_baseline(name, settings, profile, seed)
    if name not in OURS:
        raise ValueError(f"policy {name!r}: choose one of {', '.join(NAMES)}")
    return ControlPlane(policy_config(name, settings, hardware, seed), profile)


def policy_config(
    name: str, settings: Mapping[str, str], hardware: Hardware, seed: int
) -> PolicyConfig:
    """The live router's configuration for a simulated cluster. Copies are estimated by the
    hardware's bandwidth until they have been measured, and the controller is off unless set.
    Raises ``ValueError`` for settings that are not there, or that the hardware rules out."""
    for one in ("policy", "seed"):
        if one in settings:
            # The row would name another than the one that ran.
            raise ValueError(f"{one} is not a setting of a policy: give it as --{one}")
    base = PolicyConfig(policy=name, seed=seed, queue_limit=_UNLIMITED, index_mib=2048.0)
    base = replace(
        base,
        correction=CorrectionConfig(),
        controller=replace(base.controller, mode="off"),
        prefix=replace(
            base.prefix,
            mode="off",
            latency_s=hardware.copy_latency_s,
            local_bytes_per_s=hardware.local_bytes_per_s,
            remote_bytes_per_s=hardware.remote_bytes_per_s,
        ),
    )
    try:
        config = apply(base, settings)
    except ValueError as exc:
        known = ", ".join(one for one in names(base) if one not in ("policy", "seed"))
        raise ValueError(f"policy {name}: {exc}. Its settings are {known}") from exc
    if hardware.kv_partitioned and (name == "fluid" or config.controller.mode == "on"):
        mover = "policy fluid" if name == "fluid" else "controller.mode=on"
        raise ScenarioError(
            f"{mover} regroups ranks, which would have to move partitioned KV: that is not "
            "simulated. Leave hardware.kv_partitioned out, or take a policy for workers that last "
            "(paper, late) without a controller that acts"
        )
    return config
