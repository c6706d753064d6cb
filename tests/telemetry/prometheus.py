"""A real Prometheus, where one is installed: it scrapes the services and evaluates the alarms."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ports import free_port
from tests.support.services import REPOSITORY

ALERTS = REPOSITORY / "k8s" / "components" / "alerts" / "alerts.yaml"
DASHBOARD = REPOSITORY / "k8s" / "components" / "dashboard" / "tandem.json"

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not on PATH (Debian package prometheus)",
)


def rule_groups() -> list[dict[str, Any]]:
    """The alarms, as a rule file has them."""
    groups: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["spec"]["groups"]
    return groups


class Prometheus:
    """A running server."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an API call."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as response:
            return json.load(response)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query."""
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def firing(self) -> set[str]:
        """The alarms that fire now."""
        return {alert["labels"]["alertname"] for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"}

    def wait_firing(self, wanted: set[str], seconds: float) -> None:
        """Returns once all of these fire, not necessarily together."""
        seen: set[str] = set()
        deadline = time.monotonic() + seconds
        while not wanted <= seen:
            assert time.monotonic() < deadline, f"not firing: {wanted - seen}"
            time.sleep(0.2)
            seen |= self.firing()

    def wait_quiet(self, unfounded: set[str], seconds: float) -> None:
        """Returns once none of these fires. A scrape that a busy machine answers late is a service that is away, for a moment."""
        deadline = time.monotonic() + seconds
        while firing := self.firing() & unfounded:
            assert time.monotonic() < deadline, f"firing: {firing}"
            time.sleep(0.2)


@contextlib.contextmanager
def running_prometheus(folder: Path, targets: Mapping[str, str], groups: list[dict[str, Any]]) -> Iterator[Prometheus]:
    """Scrapes these addresses (by job) each second and evaluates these rules as often."""
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [address]}]} for job, address in targets.items()
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": groups}))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            _wait_ready(address, process, folder / "prometheus.log")
            yield Prometheus(address)
        finally:
            process.terminate()
            process.wait(60)


def _wait_ready(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/-/ready", timeout=5):
            return
        time.sleep(0.1)
    raise AssertionError(f"prometheus is not ready:\n{log.read_text()[-2000:]}")
