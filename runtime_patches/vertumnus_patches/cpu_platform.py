"""SGLang on machines without an accelerator: an out-of-tree platform plugin.

The in-tree CPU engine imports kernels that need ``libcuda``; this platform runs the released
wheel on plain torch. It stays out of the way wherever there is a GPU.
"""

import os


def activate() -> str | None:
    """Entry point of ``sglang.srt.platforms``: the platform class, or None to stay inert."""
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None  # the operator chose the in-tree engine
    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        return None
    return "vertumnus_patches.cpu_device.CpuPlatform"
