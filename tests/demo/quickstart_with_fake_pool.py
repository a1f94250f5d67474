"""The real quickstart with a fake model and pool; run as a process of its own, to be signalled."""

import sys
from pathlib import Path

from sgl_vertumnus.demo import embedded_model, quickstart

FAKE = Path(__file__).with_name("fake_pool.py")


def main() -> int:
    pids, *argv = sys.argv[1:]
    embedded_model.prepare = lambda **_: Path("/nonexistent")
    real = quickstart.launch_command

    def fake(options: quickstart.Options, model: Path) -> list[str]:
        python, _, _, *flags = real(options, model)
        return [python, str(FAKE), "--pids", pids, *flags]

    quickstart.launch_command = fake
    return quickstart.main(argv)


sys.exit(main())
