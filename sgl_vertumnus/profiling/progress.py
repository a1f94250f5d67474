"""How far a long measurement is: a bar on a terminal, plain lines elsewhere."""

from typing import Any, TextIO


class Progress:
    """``total`` steps, of which ``done`` are behind. Everything goes to ``out``."""

    def __init__(self, out: TextIO, total: int, done: int) -> None:
        self._out, self._total, self._done = out, total, done
        self._bar: Any = None
        if out.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, initial=done, file=out, unit="prefill")

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._bar is not None:
            self._bar.write(text, file=self._out)
        else:
            print(text, file=self._out, flush=True)

    def step(self, text: str) -> None:
        """One more is done, and what it was."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        else:
            self.say(f"[{self._done}/{self._total}] {text}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
