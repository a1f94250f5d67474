"""Prints, as JSON, what SGLang's plugin loader does to this process: outside a pool, then inside.

Installing patches changes a process for good, so this one exists for that and nothing else.
"""

import inspect
import json
import logging
import pkgutil
import sys
from types import ModuleType
from typing import Any

from sglang.srt import plugins
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.managers import data_parallel_controller, scheduler
from sglang.srt.plugins.hook_registry import HookRegistry
from vertumnus_patches.install import _calls, manifest
from vertumnus_patches.patches import ALL_PATCHES
from vertumnus_patches.record import Patch
from vertumnus_patches.seams import seams

from sgl_vertumnus.environment import publish_pool_config
from tests.worker.configs import config_of

_ = (data_parallel_controller, scheduler)  # a rank has them imported when it loads plugins


def target(patch: Patch) -> Any:
    owner, _, name = patch.target.rpartition(".")
    return inspect.getattr_static(pkgutil.resolve_name(owner), name)


def hooked() -> list[str]:
    """Targets of hooks that come from us; SGLang's dependencies bring plugins of their own."""
    return sorted(
        target
        for target, hooks in HookRegistry._hooks.items()
        for _, hook, source in hooks
        if (source is not None and source.plugin_name == "vertumnus")
        or hook.__module__.startswith(("vertumnus_", "sgl_vertumnus"))
    )


def load() -> None:
    plugins._plugins_loaded = False
    plugins.load_plugins()


def main() -> None:
    logging.disable(logging.ERROR)
    found = plugins.load_plugins_by_group(plugins.GENERAL_PLUGINS_GROUP)
    originals = {patch.id: target(patch) for patch in ALL_PATCHES}
    backend = ATTENTION_BACKENDS["torch_native"]
    importer = sys.modules["importer"] = ModuleType("importer")
    for patch in ALL_PATCHES:  # as by `from owner import name as patch_id`
        setattr(importer, patch.id, originals[patch.id])

    load()
    outside = {
        "discovered": "vertumnus" in found,
        "hooked": hooked(),
        "changed": [patch.id for patch in ALL_PATCHES if target(patch) is not originals[patch.id]],
        "bound": seams.are_bound,
        "backend_changed": ATTENTION_BACKENDS["torch_native"] is not backend,
    }

    publish_pool_config(config_of(2, (1, 2)))
    load()
    inside = {
        "hooked": hooked(),
        "live": [patch.id for patch in ALL_PATCHES if _calls(target(patch), patch.hook)],
        "alias_live": [
            patch.id for patch in ALL_PATCHES if _calls(getattr(importer, patch.id), patch.hook)
        ],
        "wraps_original": [
            patch.id for patch in ALL_PATCHES if target(patch).__wrapped__ is originals[patch.id]
        ],
        "bound": seams.are_bound,
        "rank_manifest": seams.rank._manifest == manifest(ALL_PATCHES),  # type: ignore[attr-defined]
        "backend_changed": ATTENTION_BACKENDS["torch_native"] is not backend,
    }

    wrappers = {patch.id: target(patch) for patch in ALL_PATCHES}
    plugins.load_plugins()
    twice = [patch.id for patch in ALL_PATCHES if target(patch) is not wrappers[patch.id]]
    print(json.dumps({"outside": outside, "inside": inside, "changed_by_second_load": twice}))


if __name__ == "__main__":
    main()
