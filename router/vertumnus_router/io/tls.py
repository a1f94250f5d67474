"""TLS: the certificate that clients see, and how the router trusts the servers behind it."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from vertumnus_router.core.config import ConfigError


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files. ``certfile`` and ``keyfile`` are what the router shows to its clients, with
    ``keyfile_password`` if the key has one. For the ``https://`` servers behind it: the
    authorities of ``upstream_ca_file`` vouch instead of the system's, and ``upstream_certfile``
    with ``upstream_keyfile`` says to them who the router is."""

    certfile: Path | None = None
    keyfile: Path | None = None
    keyfile_password: str | None = field(default=None, repr=False)
    upstream_ca_file: Path | None = None
    upstream_certfile: Path | None = None
    upstream_keyfile: Path | None = None

    def __post_init__(self) -> None:
        for prefix, certfile, keyfile in (
            ("ssl", self.certfile, self.keyfile),
            ("upstream", self.upstream_certfile, self.upstream_keyfile),
        ):
            if (certfile is None) != (keyfile is None):
                raise ConfigError(f"--{prefix}-certfile and --{prefix}-keyfile go together")

    @property
    def listens(self) -> bool:
        """Whether clients have to speak TLS."""
        return self.certfile is not None


def server_context(config: TlsConfig) -> ssl.SSLContext | None:
    """For the socket that clients connect to; None for plain HTTP. ``ConfigError`` if the files
    cannot be used."""
    if config.certfile is None or config.keyfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_chain(context, config.certfile, config.keyfile, config.keyfile_password)
    return context


def upstream_context(config: TlsConfig) -> ssl.SSLContext | None:
    """For connections to ``https://`` servers; None if the usual one will do. ``ConfigError`` if
    the files cannot be used."""
    if config.upstream_ca_file is None and config.upstream_certfile is None:
        return None
    try:
        context = ssl.create_default_context(cafile=config.upstream_ca_file)
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(f"{config.upstream_ca_file} holds no CA certificates: {exc}") from exc
    if config.upstream_certfile is not None and config.upstream_keyfile is not None:
        _load_chain(context, config.upstream_certfile, config.upstream_keyfile, None)
    return context


def _load_chain(
    context: ssl.SSLContext, certfile: Path, keyfile: Path, password: str | None
) -> None:
    try:
        # Without a password for a key that has one OpenSSL would ask at the terminal.
        context.load_cert_chain(certfile, keyfile, password=password or "")
    except (OSError, ssl.SSLError, ValueError) as exc:
        what = f"{certfile} and {keyfile} are no certificate and its key"
        raise ConfigError(f"{what}: {exc}") from exc
