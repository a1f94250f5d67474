"""Every error that sgl-vertumnus raises on purpose.

* VertumnusError
  + ConfigurationError    a flag or setting that cannot be used as given
    - UnsupportedFeature  it is valid SGLang, but not proven to work in a pool
  + RegroupRefused        a move was not begun; the composition still holds
  + SupervisorSilent      the process that moves the pool does not answer
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
    """A move was not begun; the message says why."""


class SupervisorSilent(VertumnusError):
    """The process that moves the pool did not answer."""

    def __init__(self, waited_s: float) -> None:
        self.waited_s = waited_s
        super().__init__(
            f"the pool's controller did not answer in {waited_s:g} s; its log says why, and "
            f"GET /vertumnus/composition whether the pool has moved"
        )


class PoolStartError(VertumnusError):
    """The pool did not become ready; the message says which part did not."""
