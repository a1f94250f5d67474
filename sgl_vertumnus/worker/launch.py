"""Start SGLang as a pool: check, rendezvous, router, server. Runs in the front's process."""

import hashlib
import hmac
import logging
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import psutil
from vertumnus_patches import SGLANG_VERSION, engine, flashinfer_attention
from vertumnus_patches.install import manifest
from vertumnus_patches.patches import ALL_PATCHES
from vertumnus_patches.seams import seams
from vertumnus_router.protocol import (
    PROTOCOL_VERSION,
    Endpoint,
    KvEvents,
    KvService,
    ModelInfo,
    PoolDescription,
    PrefillSide,
)

from sgl_vertumnus import processes
from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.device import device_name
from sgl_vertumnus.environment import forces_mooncake, publish_pool_secret
from sgl_vertumnus.errors import ConfigurationError, PoolStartError
from sgl_vertumnus.gpus import check_gpus
from sgl_vertumnus.preflight import check_flags, check_model
from sgl_vertumnus.sglang_flags import KV_TOPIC, complete_flags, cpu_kv_tokens
from sgl_vertumnus.transfer import transfer_backend
from sgl_vertumnus.worker.front import PoolFront, add_routes
from sgl_vertumnus.worker.kv_front import KvFront, add_kv_routes
from sgl_vertumnus.worker.rendezvous import open_store

logger = logging.getLogger(__name__)

ROUTER_STOP_S = 10.0


def serve(config: PoolConfig, flags: Sequence[str], *, router_flags: Sequence[str] | None) -> None:
    """Serve until interrupted; every child is gone on return.

    ``flags`` are the operator's SGLang flags; ``router_flags`` None starts no router.

    Raises:
        ConfigurationError: before any process is started.
        PoolStartError: when the pool did not become ready.
    """
    engine.load_plugins()
    if not seams.are_bound:
        raise ConfigurationError(
            "SGLang did not load the plugin 'vertumnus': name it in SGLANG_PLUGINS or unset the "
            "variable, and unset SGLANG_PLATFORM or set it to 'vertumnus_cpu'"
        )
    forces_mooncake()  # refuses what cannot be meant
    asked = engine.parse_flags(flags)
    check_flags(asked)
    flags = [*flags, *_transfer_flags(config, asked)]
    facts = engine.model_facts(asked)
    free_bytes = psutil.virtual_memory().available
    server = engine.parse_flags(
        complete_flags(
            config,
            flags,
            engine.chosen_fields(asked),
            cpu_kv_tokens=cpu_kv_tokens(config, facts.kv_elements_per_token, free_bytes),
        )
    )
    server.resolve_once()
    backends = engine.resolved_attention_backends(server)
    for backend in backends:
        check_model(
            facts,
            device=config.device,
            attention_backend=backend,
            allow_unproven_gpu=config.allow_unproven_gpu,
        )
    if config.device == "cpu":
        engine.preload(server, facts.name)
    else:
        check_gpus(config)
        if flashinfer_attention.NAME in backends:
            flashinfer_attention.check_installed()
    store = open_store(config)
    logger.info("rendezvous on port %d for %s", store.port, config)
    front = PoolFront(config, server.url(), asked.admin_api_key)
    secret = _secret_of(asked)
    kv = KvFront(config, secret)
    add_kv_routes(engine.http_app(), kv)
    add_routes(
        engine.http_app(), front, lambda: _describe(config, facts, engine.front_state(), kv.service)
    )
    if router_flags is not None and asked.admin_api_key is not None:
        router_flags = [*router_flags, "--control-key", asked.admin_api_key]
    router = _start_router(server.url(), router_flags)
    publish_pool_secret(secret)  # to SGLang's children, not to the router
    try:
        engine.serve_http(server, start=lambda: _start(front, router, kv.start))
    finally:
        _stop_children(router)


def _transfer_flags(config: PoolConfig, asked: Any) -> list[str]:
    is_prefill = asked.disaggregation_mode == "prefill"
    if is_prefill != (config.bootstrap_port is not None):
        raise ConfigurationError("give --disaggregation-mode on the command line, not in a file")
    if not is_prefill:
        return []
    backend = transfer_backend(asked.disaggregation_transfer_backend, device=config.device)
    return ["--disaggregation-transfer-backend", backend]


def _secret_of(asked: Any) -> str:
    """What lets ranks copy from each other; equal for pools that have the same key."""
    key = asked.admin_api_key or secrets.token_hex(32)
    return hmac.new(key.encode(), b"sgl-vertumnus pool", hashlib.sha256).hexdigest()


def _start(
    front: PoolFront, router: subprocess.Popen[bytes] | None, warmed_up: Callable[[], None]
) -> None:
    front.start(warmed_up)
    if router is not None and (status := router.poll()) is not None:
        raise PoolStartError(
            f"the router exited with status {status}; its log above says why. Use another "
            f"--router-port, or --no-router"
        )


def _describe(
    config: PoolConfig,
    facts: engine.ModelFacts,
    state: engine.FrontState,
    kv_service: KvService | None,
) -> PoolDescription:
    return PoolDescription(
        version=PROTOCOL_VERSION,
        pool_id=config.pool_id,
        sglang_version=SGLANG_VERSION,
        pool_size=config.size,
        degrees=config.degrees,
        model=ModelInfo(
            served_name=state.served_model_name,
            model_path=state.model_path,
            tokenizer_path=state.tokenizer_path,
            context_tokens=facts.context_tokens,
            kv_capacity_tokens=state.kv_capacity_tokens,
            chunk_tokens=state.chunk_tokens,
            chat_template=state.chat_template,
            shape=f"{facts.shape}, {state.dtype}" if facts.shape else "",
        ),
        kv_events=KvEvents(
            publish=Endpoint(port_base=config.ports.kv_events),
            replay=Endpoint(port_base=config.ports.kv_replay),
            topic=KV_TOPIC,
            block_tokens=state.page_tokens,
        ),
        reports=Endpoint(port_base=config.ports.reports),
        manifest=manifest(ALL_PATCHES),
        prefill=_prefill_side(config, state),
        kv_service=kv_service,
        device=device_name(config),
    )


def _prefill_side(config: PoolConfig, state: engine.FrontState) -> PrefillSide | None:
    if config.bootstrap_port is None:
        return None
    return PrefillSide(
        bootstrap_port=config.bootstrap_port,
        dtype=state.dtype,
        kv_cache_dtype=state.kv_cache_dtype,
    )


def _start_router(pool_url: str, flags: Sequence[str] | None) -> subprocess.Popen[bytes] | None:
    if flags is None:
        return None
    command = [sys.executable, "-m", "sgl_vertumnus.launch_router", "--pool-urls", pool_url]
    return subprocess.Popen([*command, *flags], preexec_fn=processes.die_with_parent)


def _stop_children(router: subprocess.Popen[bytes] | None) -> None:
    """The router gets time to end its streams; SGLang's children have no state to save."""
    if router is not None:
        router.terminate()
        try:
            router.wait(ROUTER_STOP_S)
        except subprocess.TimeoutExpired:
            logger.warning("the router did not stop in %.0f s; killing it", ROUTER_STOP_S)
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
