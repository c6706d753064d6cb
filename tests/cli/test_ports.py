"""A port that is asked for before a service starts on it."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from tandem.cli import ports
from tandem.cli.address import Address
from tandem.cli.errors import CliError


@pytest.mark.skipif(sys.platform != "linux", reason="how long a connection lingers is Linux's")
def test_a_port_that_an_ended_connection_lingers_on_is_waited_for_and_said(monkeypatch):
    with socket.socket() as near, socket.create_server(("127.0.0.1", 0)) as server:
        near.bind(("127.0.0.1", 0))
        port = near.getsockname()[1]
        near.connect(server.getsockname())
        far, _ = server.accept()
        near.close()  # first: its end lingers for a minute
        far.close()
    monkeypatch.setattr(ports, "_LINGERING_SECONDS", 0.5)
    told: list[str] = []
    with pytest.raises(CliError, match=rf"port {port} is in use \(by connections that have ended: TIME-WAIT\).*set X"):
        ports.require_free(Address("127.0.0.1", port), "draft", "X", told.append)
    assert len(told) == 1
    assert str(port) in told[0]


def test_the_holder_of_a_port_is_named_in_full():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(*server.getsockname())
        with pytest.raises(CliError, match=rf"by pid {os.getpid()}: .*set X"):
            ports.require_free(address, "draft", "X", pytest.fail)
    ports.require_free(address, "draft", "X", pytest.fail)
