"""Open what the configuration wants observed."""

from vertumnus_router.clock import Clock
from vertumnus_router.core.config import ConfigError
from vertumnus_router.io.metrics import RouterMetrics
from vertumnus_router.io.observe.observer import Observer, Tracer
from vertumnus_router.io.observe.request_log import RequestLog
from vertumnus_router.io.observe.settings import ObserveConfig


def start_observer(config: ObserveConfig, clock: Clock, metrics: RouterMetrics) -> Observer:
    """Raises ``ConfigError`` if traces are wanted and OpenTelemetry is not there, ``OSError`` if
    the request log cannot be written."""
    tracer = None if config.otlp_traces_endpoint is None else _tracer(config, clock)
    log = None if config.request_log is None else RequestLog(config.request_log, clock)
    return Observer(clock=clock, metrics=metrics, slo=config.slo, log=log, tracer=tracer)


def _tracer(config: ObserveConfig, clock: Clock) -> Tracer:
    assert config.otlp_traces_endpoint is not None
    try:
        from vertumnus_router.io.observe.tracing import otlp_tracer
    except ImportError as exc:
        raise ConfigError(
            f"otlp_traces_endpoint: traces need OpenTelemetry ({exc}): "
            "pip install 'sgl-vertumnus[otel]'"
        ) from exc
    return otlp_tracer(config.otlp_traces_endpoint, clock)
