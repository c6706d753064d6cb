"""Settings that can't work are refused at start, by the name of their variable."""

from __future__ import annotations

from typing import Any

import pytest

from draft_service.config import DraftConfig
from orchestrator.config import OrchestratorConfig
from tandem.config import ConfigError, load
from target_service.config import TargetConfig

NEEDED = {
    "TANDEM_TARGET_ADDRESSES": "127.0.0.1:1",
    "TANDEM_TOKENIZER": "t",
    "TANDEM_REDIS_URL": "redis://localhost",
    "TANDEM_DRAFT_MODEL": "m",
    "TANDEM_TARGET_MODEL": "m",
}


@pytest.mark.parametrize(
    ("kind", "variable", "value"),
    [
        *((DraftConfig, "TANDEM_DRAFT_METRICS_LISTEN", value) for value in ("127.0.0.1:70000", "9090", ":x", "h:²")),
        (TargetConfig, "TANDEM_TARGET_METRICS_LISTEN", "127.0.0.1:70000"),
        (TargetConfig, "TANDEM_TARGET_HEALTH_LISTEN", "127.0.0.1:70000"),
        (OrchestratorConfig, "TANDEM_ORCHESTRATOR_METRICS_LISTEN", "127.0.0.1:70000"),
        (OrchestratorConfig, "TANDEM_DRAFT_ADDRESSES", "host"),
        *((OrchestratorConfig, "TANDEM_STORE_DURABILITY", f"replicas={value}") for value in ("-1", "+1", "17", "²")),
    ],
)
def test_a_value_out_of_range(kind: type[Any], variable: str, value: str) -> None:
    load(kind, [], NEEDED)
    with pytest.raises(ConfigError, match=variable):
        load(kind, [], {**NEEDED, variable: value})
