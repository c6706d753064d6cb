"""Settings that all three services have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tandem import telemetry
from tandem.config import address, choice, setting
from tandem.transport_security import ServerFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """How a service is reached, and how it logs."""

    role: ClassVar[str]
    """draft, target or orchestrator: a part of the variables' names."""

    metrics_listen: str = address(
        "TANDEM_{role}_METRICS_LISTEN", "", help="host:port for Prometheus; empty: no metrics endpoint"
    )
    health_listen: str = address(
        "TANDEM_{role}_HEALTH_LISTEN",
        "",
        help="host:port where health alone is served, in plain text, for probes that speak no TLS; empty: not",
    )
    tls_certificate: str = setting(
        "TANDEM_TLS_CERTIFICATE", "", help="PEM file of the certificate to serve with; empty: plain text"
    )
    tls_key: str = setting("TANDEM_TLS_KEY", "", help="PEM file of its key")
    tls_client_ca: str = setting(
        "TANDEM_TLS_CLIENT_CA", "", help="PEM file of the CA whose clients may connect; empty: any may"
    )
    log_level: str = choice(
        "TANDEM_LOG_LEVEL", "INFO", telemetry.LEVELS, help="least level that is logged", parse=str.upper
    )
    log_format: str = choice("TANDEM_LOG_FORMAT", "text", telemetry.FORMATS, help="text, or json for one object a line")

    def server_files(self) -> ServerFiles:
        """What to serve with."""
        return ServerFiles(self.tls_certificate, self.tls_key, self.tls_client_ca)
