"""Whether a block of ranks may begin prefills. Pure."""

#: A hold ends by itself after this long: longer than a move may take.
HOLD_S = 20.0


class Hold:
    """Between PREPARE and COMMIT or ABANDON, kept by every rank of the block alike."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._since_s = 0.0

    @property
    def epoch(self) -> int | None:
        """The epoch that is being prepared; None: prefills may begin."""
        return self._epoch

    def begin(self, epoch: int, now_s: float) -> None:
        self._epoch, self._since_s = epoch, now_s

    def end(self, epoch: int) -> None:
        """The move to ``epoch``, or to a later one than was prepared, is over."""
        if self._epoch is not None and epoch >= self._epoch:
            self._epoch = None

    def has_expired(self, now_s: float) -> bool:
        """Whether it was forgotten. The leader decides, since clocks differ, and tells its
        members."""
        return self._epoch is not None and now_s - self._since_s > HOLD_S
