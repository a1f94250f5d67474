"""matplotlib, if it is installed (the ``bench`` extra)."""

import importlib.util
from typing import Any

from vertumnus_bench.figures import say


def svg_pyplot() -> Any | None:
    """``matplotlib.pyplot``, drawing SVG. None without matplotlib, which is said."""
    if importlib.util.find_spec("matplotlib") is None:
        say("no plot: matplotlib is missing, pip install 'sgl-vertumnus[bench]'")
        return None
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    return pyplot
