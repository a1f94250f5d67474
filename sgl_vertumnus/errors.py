"""Every error that sgl-vertumnus raises on purpose.

* VertumnusError
  + ConfigurationError    a flag or setting that cannot be used as given
    - UnsupportedFeature  it is valid SGLang, but not proven to work in a pool
  + RegroupRefused        a composition was not applied; the previous one still holds
  + PoolStartError        the pool did not become ready
"""


class VertumnusError(Exception):
    """Base of all."""


class ConfigurationError(VertumnusError):
    """A flag or setting that cannot be used as given; the message says what to do."""


class UnsupportedFeature(ConfigurationError):
    """SGLang features that a pool refuses at start.

    ``reasons`` holds one sentence per feature, all of them.
    """

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons
        lines = "\n".join(f"  - {reason}" for reason in reasons)
        super().__init__(f"this pool cannot run as asked:\n{lines}")


class RegroupRefused(VertumnusError):
    """A composition was not applied. ``epoch`` is the epoch that was asked for."""

    def __init__(self, epoch: int, reason: str) -> None:
        self.epoch, self.reason = epoch, reason
        super().__init__(f"epoch {epoch} was not applied: {reason}")


class PoolStartError(VertumnusError):
    """The pool did not become ready; the message says which part did not."""
