"""Settings that can't work are refused at start, by the name of their variable, each kind of them at each service."""

from __future__ import annotations

import re

import pytest

from draft_service.config import DraftConfig
from orchestrator.config import OrchestratorConfig
from tandem import config
from tandem.cli import variables
from tandem.config import ConfigError
from tandem.engine.ranks import ALONE, Ranks, ranks_from
from target_service.config import TargetConfig

NEEDED = {
    "TANDEM_DRAFT_MODEL": "m",
    "TANDEM_TARGET_MODEL": "m",
    "TANDEM_TARGET_ADDRESSES": "a:1",
    "TANDEM_TOKENIZER": "t",
    "TANDEM_REDIS_URL": "redis://r",
}


@pytest.mark.parametrize(
    ("service", "variable", "value", "expected"),
    [
        (DraftConfig, "TANDEM_DRAFT_SLOTS", "0", "1 to 4096"),
        (TargetConfig, "TANDEM_TARGET_SLOTS", "1.5", "1 to 4096"),
        (TargetConfig, "TANDEM_TARGET_CONTEXT_LENGTH", "-1", "at least 0"),
        (TargetConfig, "TANDEM_TARGET_DTYPE", "int3", "one of auto, float32"),
        (TargetConfig, "TANDEM_TARGET_COMPILE", "max-autotune", "one of off, inductor, graphs, inductor"),
        (TargetConfig, "TANDEM_DRAIN_SECONDS", "3601", "0 to 3600"),
        (TargetConfig, "TANDEM_DRAIN_SECONDS", "nan", "0 to 3600"),
        (OrchestratorConfig, "TANDEM_DRAFT_TIMEOUT_SECONDS", "0", "more than 0"),
        (OrchestratorConfig, "TANDEM_DRAFT_TIMEOUT_SECONDS", "nan", "more than 0"),
        (OrchestratorConfig, "TANDEM_MAX_WAITING_SECONDS", "-1", "at least 0"),
        (OrchestratorConfig, "TANDEM_STORE_TIMEOUT_SECONDS", "inf", "more than 0, and finite"),
        (OrchestratorConfig, "TANDEM_STORE_RETRY_SECONDS", "inf", "at least 0, and finite"),
        (OrchestratorConfig, "TANDEM_LOOK_AHEAD", "maybe", "true or false"),
        *(
            (DraftConfig, "TANDEM_DRAFT_METRICS_LISTEN", value, "host:port")
            for value in ("h:70000", "9090", ":x", "h:²")
        ),
        (DraftConfig, "TANDEM_DRAFT_LISTEN", "50052", "host:port"),
        (TargetConfig, "TANDEM_TARGET_LISTEN", "127.0.0.1:70000", "host:port"),
        (TargetConfig, "TANDEM_TARGET_HEALTH_LISTEN", "127.0.0.1:70000", "host:port"),
        (OrchestratorConfig, "TANDEM_ORCHESTRATOR_METRICS_LISTEN", "host:99999", "host:port"),
        (OrchestratorConfig, "TANDEM_DRAFT_ADDRESSES", "host", ""),
        *(
            (OrchestratorConfig, "TANDEM_STORE_DURABILITY", f"replicas={value}", "memory")
            for value in ("-1", "+1", "17", "²")
        ),
        (OrchestratorConfig, "TANDEM_ORCHESTRATOR_LISTEN", "", "host:port"),
        (DraftConfig, "TANDEM_LOG_LEVEL", "loud", "one of DEBUG, INFO"),
    ],
)
def test_a_bad_value_is_refused_by_name(service: type, variable: str, value: str, expected: str) -> None:
    config.load(service, [], NEEDED)
    with pytest.raises(config.ConfigError, match=rf"^{variable}='{re.escape(value)}' .*expected {expected}"):
        config.load(service, [], {**NEEDED, variable: value})


def test_each_service_reads_its_own_variables_and_those_that_it_shares() -> None:
    environment = {
        **NEEDED,
        "TANDEM_DRAFT_SLOTS": "3",
        "TANDEM_TARGET_SLOTS": "4",
        "TANDEM_TARGET_METRICS_LISTEN": "0.0.0.0:9090",
        "TANDEM_LOG_LEVEL": "debug",
    }
    draft, target = (
        config.load(DraftConfig, [], environment),
        config.load(TargetConfig, ["--threads", "2"], environment),
    )
    assert (draft.slots, draft.threads, draft.metrics_listen, draft.log_level) == (3, 0, "", "DEBUG")
    assert (target.slots, target.threads, target.metrics_listen, target.log_level) == (4, 2, "0.0.0.0:9090", "DEBUG")


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(("wanted", "started"), [(2, {}), (1, {**TORCHRUN, "WORLD_SIZE": "4", "RANK": "0"})])
def test_as_many_ranks_as_are_started(wanted: int, started: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"TANDEM_TARGET_TENSOR_PARALLEL: {wanted} means"):
        ranks_from(started, wanted, "TANDEM_TARGET_TENSOR_PARALLEL")
    environ = {**TORCHRUN, "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    assert ranks_from(environ, 2, "TANDEM_TARGET_TENSOR_PARALLEL") == Ranks(2, 1, 1)


def test_what_a_model_in_parts_cannot_do_is_named() -> None:
    asked = {**NEEDED, "TANDEM_TARGET_COMPILE": "inductor"}
    assert config.load(TargetConfig, [], asked).compile == "inductor"
    with pytest.raises(ConfigError, match=r"^TANDEM_TARGET_COMPILE=inductor is for a model in one process"):
        config.load(TargetConfig, [], {**asked, "TANDEM_TARGET_TENSOR_PARALLEL": "2"})


@pytest.mark.parametrize("size", ["", "8", "many"])
def test_a_target_alone_is_alone_whatever_another_launcher_says(size: str) -> None:
    assert ranks_from({"WORLD_SIZE": size, "RANK": "3"}, 1, "TANDEM_TARGET_TENSOR_PARALLEL") == ALONE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", ""),
        ("WORLD_SIZE", "-2"),
        ("RANK", "one"),
        ("RANK", None),
        ("RANK", "2"),
        ("LOCAL_RANK", "x"),
        ("MASTER_ADDR", None),
        ("MASTER_PORT", ""),
    ],
)
def test_what_a_launcher_left_out_is_named(name: str, value: str | None) -> None:
    whole = {**TORCHRUN, "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", name: value}
    environ = {key: text for key, text in whole.items() if text is not None}
    with pytest.raises(ConfigError, match=f"^{name}: "):
        ranks_from(environ, 2, "TANDEM_TARGET_TENSOR_PARALLEL")


def test_the_command_line_knows_every_variable_of_the_services() -> None:
    read = (config.settings_of(service).values() for service in (DraftConfig, TargetConfig, OrchestratorConfig))
    assert {setting.variable for settings in read for setting in settings} == variables.SERVICES
