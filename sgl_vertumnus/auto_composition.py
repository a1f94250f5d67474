"""``launch_server --composition auto``: what a pool starts as, from a profile and a history."""

from pathlib import Path

from vertumnus_router.core.config import ControllerConfig
from vertumnus_router.core.initial import InitialComposition, initial_composition
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.profile import ProfileError
from vertumnus_router.profiles import load_profile

from sgl_vertumnus.config import check_geometry
from sgl_vertumnus.errors import ConfigurationError
from sgl_vertumnus.history import past_requests, read_history

AUTO = "auto"


def auto_composition(
    size: int,
    degrees: tuple[int, ...],
    *,
    profile: str,
    history: Path | None,
    controller: ControllerConfig,
) -> InitialComposition:
    """The most large-degree workers that bear the busiest window of ``history``, in the windows
    and below the upper threshold of the controller, which would split a busier pool at once.

    Raises:
        ConfigurationError: without a history, or with a profile that lacks κ for a degree.
    """
    degrees, _ = check_geometry(size, degrees, None)
    if history is None:
        raise ConfigurationError("--composition auto needs --history, a trace of past requests")
    try:
        known = load_profile(profile)
    except ProfileError as exc:
        raise ConfigurationError(f"--profile {profile}: {exc}") from exc
    missing = [degree for degree in degrees if degree not in known.kappa]
    if missing:
        raise ConfigurationError(
            f"--composition auto needs a --profile with kappa for every degree, and {profile} has "
            f"none for {', '.join(map(str, missing))}: measure it with sgl-vertumnus profile"
        )
    model = PrefillModel(known)
    faults = [fault for degree in degrees if (fault := model.fault(degree))]
    if faults:
        raise ConfigurationError(f"--profile {profile}: {faults[0]}")
    return initial_composition(
        size,
        degrees,
        past_requests(read_history(history)),
        model.profiled_s,
        known.kappa,
        window_s=controller.window_s,
        upper=controller.upper,
    )
