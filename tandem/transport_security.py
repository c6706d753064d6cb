"""TLS between callers, services and the store: which files, and credentials that follow them when they change.

Servers read their files anew for each new connection, clients for each new channel, so that a renewed certificate needs no
restart; what is connected stays connected. A file that can't be read, or makes no pair with the other, leaves the former ones in force.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from tandem.config import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """PEM files of a server; empty: plain text. With `client_ca`, only clients with a certificate of that CA get in."""

    certificate: str = ""
    key: str = ""
    client_ca: str = ""

    def credentials(self) -> grpc.ServerCredentials | None:
        """What to listen with; None for plain text. Raises ConfigError."""
        _check_pair(self.certificate, self.key, "TANDEM_TLS")
        if self.client_ca and not self.certificate:
            raise ConfigError("TANDEM_TLS_CLIENT_CA needs TANDEM_TLS_CERTIFICATE")
        if not self.certificate:
            return None
        if self.client_ca:
            _readable(self.client_ca, "TANDEM_TLS_CLIENT_CA")
            try:
                _try_pair(self)
            except ssl.SSLError as error:
                raise ConfigError(f"TANDEM_TLS_CLIENT_CA holds no certificates: {error.reason}") from error
        watched = _WatchedServer(self)
        return grpc.dynamic_ssl_server_credentials(
            watched.initial,
            watched.changed,  # type: ignore[arg-type]  # None is no change; the stubs don't know
            require_client_authentication=bool(self.client_ca),
        )


@dataclass(frozen=True, slots=True)
class ClientFiles:
    """PEM files of a client; without `ca`: plain text. A certificate and its key are shown to servers that ask."""

    ca: str = ""
    certificate: str = ""
    key: str = ""

    def check(self, prefix: str) -> None:
        """Raises ConfigError that names the variable, which begins with `prefix`."""
        _check_pair(self.certificate, self.key, prefix)
        if self.certificate and not self.ca:
            raise ConfigError(f"{prefix}_CERTIFICATE needs {prefix}_CA")
        if self.ca:
            _readable(self.ca, f"{prefix}_CA")

    def credentials(self) -> grpc.ChannelCredentials | None:
        """What the files hold now; None for plain text. Raises OSError."""
        if not self.ca:
            return None
        certificate = Path(self.certificate).read_bytes() if self.certificate else None
        key = Path(self.key).read_bytes() if self.key else None
        return grpc.ssl_channel_credentials(Path(self.ca).read_bytes(), key, certificate)


def client_files(environment: Mapping[str, str], prefix: str) -> ClientFiles:
    """The files that the variables PREFIX_CA, PREFIX_CERTIFICATE and PREFIX_KEY name. Raises ConfigError."""
    files = ClientFiles(*(environment.get(f"{prefix}_{part}", "") for part in ("CA", "CERTIFICATE", "KEY")))
    files.check(prefix)
    return files


class _WatchedServer:
    """Tells gRPC, which asks before each handshake, when the files have changed."""

    def __init__(self, files: ServerFiles) -> None:
        self._files = files
        self._held = self._read()
        self.initial = _configuration(self._held)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called in a thread of gRPC's."""
        try:
            contents = self._read()
            if contents == self._held:
                return None
            _try_pair(self._files)
            if self._read() != contents:
                return None  # they change at this moment: what was tried is not what was read
            self._held = contents
            log.info("the certificates have changed")
            return _configuration(contents)
        except (OSError, ValueError):
            log.exception("the changed certificates can't be used; the former ones stay in force")
            return None

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        ca = Path(self._files.client_ca).read_bytes() if self._files.client_ca else None
        return Path(self._files.key).read_bytes(), Path(self._files.certificate).read_bytes(), ca


def _configuration(contents: tuple[bytes, bytes, bytes | None]) -> grpc.ServerCertificateConfiguration:
    key, certificate, ca = contents
    return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=ca)


def _check_pair(certificate: str, key: str, prefix: str) -> None:
    if bool(certificate) != bool(key):
        missing, given = ("KEY", "CERTIFICATE") if certificate else ("CERTIFICATE", "KEY")
        raise ConfigError(f"{prefix}_{given} needs {prefix}_{missing}")
    if not certificate:
        return
    _readable(certificate, f"{prefix}_CERTIFICATE")
    _readable(key, f"{prefix}_KEY")
    try:
        _try_pair(ServerFiles(certificate, key))
    except ssl.SSLError as error:
        raise ConfigError(f"{prefix}_CERTIFICATE and {prefix}_KEY are no pair: {error.reason}") from error


def _try_pair(files: ServerFiles) -> None:
    """Raises ssl.SSLError, an OSError, where key and certificate don't belong together. gRPC would only fail each handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    if files.client_ca:
        context.load_verify_locations(files.client_ca)


def _readable(path: str, variable: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{variable}: {path!r} can't be read: {error.strerror}") from error
