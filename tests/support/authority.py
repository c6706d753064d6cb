"""A certificate authority made for a test, and where its certificates lie."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme

from tandem.transport_security import ClientFiles


class Authority:
    """A new CA in `folder`; its certificate is `ca.pem` there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._ca = trustme.CA()
        self._ca.cert_pem.write_to_path(str(folder / "ca.pem"))

    def issue(self, name: str, *identities: str) -> tuple[str, str]:
        """PEM files of a certificate and its key."""
        issued = self._ca.issue_cert(*identities)
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        issued.private_key_pem.write_to_path(str(key))
        certificate.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        return str(certificate), str(key)

    def client(self, name: str, *identities: str) -> ClientFiles:
        """What a client of this CA's has."""
        return ClientFiles(str(self.folder / "ca.pem"), *self.issue(name, *identities))


def server_context(ca: str, certificate: str, key: str) -> ssl.SSLContext:
    """For a server that wants certificates of its clients."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca)
    context.load_cert_chain(certificate, key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context
