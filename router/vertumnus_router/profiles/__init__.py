"""Profiles that ship with the router, and where a profile's file is read."""

from importlib import resources
from pathlib import Path

from vertumnus_router.core.profile import Profile, ProfileError, decode_profile

DEFAULT = "smollm2-135m-cpu"


def shipped() -> tuple[str, ...]:
    """The names of the profiles in the package."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


def load_profile(name_or_path: str) -> Profile:
    """A shipped profile by name, or one from a JSON file. Raises ``ProfileError``."""
    if name_or_path in shipped():
        data = resources.files(__name__).joinpath(f"{name_or_path}.json").read_bytes()
        return decode_profile(data, f"profile {name_or_path}")
    try:
        data = Path(name_or_path).read_bytes()
    except OSError as exc:
        raise ProfileError(
            f"no profile {name_or_path!r}: neither a readable file ({exc.strerror}) nor one of "
            f"{', '.join(shipped())}"
        ) from exc
    return decode_profile(data, name_or_path)
