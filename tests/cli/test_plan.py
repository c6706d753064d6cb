"""From variables and flags to the commands that are started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.cli import plan as plan_of_stack
from tandem.cli.address import Address, parse_address
from tandem.cli.arguments import build_parser
from tandem.cli.choices import choices, differing, mask_password
from tandem.cli.encryption import from_record
from tandem.cli.errors import CliError
from tandem.cli.plan import StackPlan, plan_stack
from tandem.cli.settings import load_settings, with_flags
from tandem.cli.stack import last_lines
from tandem.cli.variables import misspelt
from tandem.transport_security import ClientFiles
from tests.support.authority import Authority


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return {
        "TANDEM_HOME": str(tmp_path / "home"),
        "TANDEM_DRAFT_MODEL": str(model),
        "TANDEM_TARGET_MODEL": str(model),
    }


def plan(variables: dict[str, str], *arguments: str) -> StackPlan:
    parsed = build_parser().parse_args(["up", *arguments])
    return plan_stack(load_settings(with_flags(parsed, variables)))


def names(planned: StackPlan) -> list[str]:
    return [spec.name for spec in planned.services]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("example:5", Address("example", 5)),
        ("[::1]:5", Address("::1", 5)),
        (":5", Address("127.0.0.1", 5)),
        ("5", Address("127.0.0.1", 5)),
    ],
)
def test_addresses(text, expected):
    assert parse_address(text, "X") == expected
    assert parse_address(str(expected), "X") == expected


@pytest.mark.parametrize("text", ["", "host", "host:", "host:0", "host:65536", "host:-1", "host:\u0661", "[::1:5"])
def test_bad_addresses_name_the_variable(text):
    with pytest.raises(CliError, match="TANDEM_X_LISTEN") as caught:
        parse_address(text, "TANDEM_X_LISTEN")
    assert caught.value.exit_code == 2


def test_a_wildcard_is_reached_on_loopback():
    assert str(parse_address("0.0.0.0:5", "X").reachable()) == "127.0.0.1:5"
    assert str(parse_address("[::]:5", "X").reachable()) == "[::1]:5"


def test_everything_is_embedded_by_default(variables):
    planned = plan(variables)
    assert names(planned) == ["redis", "draft", "target", "orchestrator"]
    assert planned.orchestrator_address == "127.0.0.1:50051"
    environment = planned.services[-1].environment
    assert environment["TANDEM_DRAFT_ADDRESSES"] == "127.0.0.1:50052"
    assert environment["TANDEM_TARGET_ADDRESSES"] == "127.0.0.1:50053"
    assert environment["TANDEM_REDIS_URL"] == "redis://127.0.0.1:6399/0"
    assert environment["TANDEM_TOKENIZER"] == variables["TANDEM_TARGET_MODEL"]


def test_draft_and_target_share_the_cores_where_they_run_at_the_same_time(variables):
    def threads() -> list[str]:
        draft, target = plan(variables).services[1:3]
        return [draft.environment["TANDEM_DRAFT_THREADS"], target.environment["TANDEM_TARGET_THREADS"]]

    cores = os.cpu_count() or 1
    assert threads() == [str(min(2, cores)), "0"]
    variables["TANDEM_DRAFT_AHEAD_ROWS"] = "4"
    assert threads() == ["1", str(max(1, cores // 2))]
    variables["TANDEM_TARGET_THREADS"] = "3"
    assert threads() == ["1", "3"]


def test_a_flag_wins_over_its_variable(variables):
    variables["TANDEM_DRAFT_LISTEN"] = "127.0.0.1:1"
    planned = plan(variables, "--draft-listen=127.0.0.1:2")
    assert planned.services[1].listen.port == 2
    assert planned.services[-1].environment["TANDEM_DRAFT_ADDRESSES"] == "127.0.0.1:2"


def test_the_tokenizer_is_in_the_targets_gguf_file_unless_another_is_named(variables):
    variables["TANDEM_TARGET_GGUF_FILE"] = "model.gguf"
    assert plan(variables).services[-1].environment["TANDEM_TOKENIZER_GGUF_FILE"] == "model.gguf"
    environment = plan({**variables, "TANDEM_TOKENIZER": "elsewhere"}).services[-1].environment
    assert "TANDEM_TOKENIZER_GGUF_FILE" not in environment


def test_the_http_flag_reaches_what_is_started(variables):
    parsed = build_parser().parse_args(["up", "--http-listen=127.0.0.1:3"])
    assert load_settings(with_flags(parsed, variables)).environment["TANDEM_HTTP_LISTEN"] == "127.0.0.1:3"


@pytest.mark.parametrize(
    ("variable", "value", "left"),
    [
        ("TANDEM_REDIS_URL", "redis://db:6379/1", ["draft", "target", "orchestrator"]),
        ("TANDEM_DRAFT_ADDRESSES", "a:1, b:2", ["redis", "target", "orchestrator"]),
        ("TANDEM_TARGET_ADDRESSES", "a:1,b:2", ["redis", "draft", "orchestrator"]),
    ],
)
def test_running_parts_replace_the_embedded_ones(variables, variable, value, left):
    planned = plan({**variables, variable: value})
    assert names(planned) == left
    assert planned.services[-1].environment[variable] == value.replace(" ", "")
    assert len(planned.external) == 1


def test_a_running_orchestrator_brings_its_own(variables):
    planned = plan(variables, "--orchestrator-address=far:5")
    assert names(planned) == []
    assert planned.orchestrator_address == "far:5"


def test_models_are_checked_unless_they_may_be_names(variables, tmp_path):
    with pytest.raises(CliError, match="TANDEM_DRAFT_MODEL"):
        plan(variables, "--draft-model=./no-such-folder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CliError, match="holds no model"):
        plan(variables, f"--draft-model={tmp_path / 'empty'}")
    assert plan(variables, "--draft-model=org/name").services[1].environment["TANDEM_DRAFT_MODEL"] == "org/name"
    # A service that runs elsewhere has its model there.
    assert "draft" not in names(plan(variables, "--draft-model=./no-such-folder", "--draft-addresses=a:1"))


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan", "soon"])
def test_a_bad_time_limit_is_a_usage_error(variables, seconds):
    with pytest.raises(CliError, match="TANDEM_READY_TIMEOUT"):
        plan(variables, f"--ready-timeout={seconds}")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TANDEM_TLS_CERTIFICATE", "tls.crt"),
        ("TANDEM_TLS_REDIS_CA", "ca.crt"),
        ("TANDEM_REDIS_URL", "redis+sentinel://:secret@host:26379/main"),
        ("TANDEM_REDIS_URL", "rediss+cluster://:secret@host:6379,host:6380"),
    ],
)
def test_what_it_cannot_start_is_refused_by_name(variables, variable, value):
    with pytest.raises(CliError, match=variable) as refusal:
        load_settings({**variables, variable: value})
    assert "secret" not in str(refusal.value)
    assert load_settings({**variables, variable: "", "TANDEM_TLS_ORCHESTRATOR_CA": "ca.crt"})


CA, PAIR = {"CA": "ca.pem"}, {"CERTIFICATE": "one.pem", "KEY": "one.key"}


def _edge(name, *files):
    return {f"TANDEM_TLS_{name}{part}": path for each in files for part, path in each.items()}


SERVED, GUARDED = _edge("", PAIR), {**_edge("", PAIR), "TANDEM_TLS_CLIENT_CA": "ca.pem"}
WORKERS, CALLERS, STORE = _edge("WORKER_", CA), _edge("ORCHESTRATOR_", CA), _edge("REDIS_", CA)
REDISS = {"TANDEM_REDIS_URL": "rediss://:secret@db:6380/0"}


@pytest.fixture
def certificates(tmp_path, monkeypatch):
    """In the folder that the command is called in."""
    Authority(tmp_path).issue("one", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({**SERVED, **CALLERS}, "TANDEM_TLS_CERTIFICATE.*TANDEM_TLS_WORKER_CA"),
        ({**SERVED, **WORKERS}, "TANDEM_TLS_CERTIFICATE.*TANDEM_TLS_ORCHESTRATOR_CA"),
        ({**GUARDED, **WORKERS, **CALLERS}, "TANDEM_TLS_CLIENT_CA.*TANDEM_TLS_WORKER_CERTIFICATE"),
        (
            {**GUARDED, **_edge("WORKER_", CA, PAIR), **CALLERS},
            "TANDEM_TLS_CLIENT_CA.*TANDEM_TLS_ORCHESTRATOR_CERTIFICATE",
        ),
        (WORKERS, "TANDEM_TLS_WORKER_CA.*TANDEM_TLS_CERTIFICATE"),
        ({**WORKERS, "TANDEM_DRAFT_ADDRESSES": "a:1"}, "TANDEM_TLS_WORKER_CA.*TANDEM_TLS_CERTIFICATE"),
        (STORE, "TANDEM_TLS_REDIS_CA.*embedded.*TANDEM_REDIS_URL"),
        ({**STORE, "TANDEM_REDIS_URL": "redis://:secret@db:6379/0"}, "TANDEM_TLS_REDIS_CA.*rediss://"),
        ({**REDISS, **_edge("REDIS_", PAIR)}, "TANDEM_TLS_REDIS_CERTIFICATE needs TANDEM_TLS_REDIS_CA"),
        ({**SERVED, "TANDEM_TLS_KEY": "ca.pem"}, "TANDEM_TLS_CERTIFICATE and TANDEM_TLS_KEY are no pair"),
    ],
)
def test_services_that_would_not_find_to_one_another_are_not_started(variables, certificates, given, missing):
    with pytest.raises(CliError, match=missing) as refusal:
        load_settings({**variables, **given})
    assert refusal.value.exit_code == 2
    assert "secret" not in str(refusal.value)


def test_each_service_is_asked_with_the_files_of_its_edge(variables, certificates):
    files = str(certificates / "ca.pem"), str(certificates / "one.pem"), str(certificates / "one.key")
    edges = {**_edge("WORKER_", CA, PAIR), **_edge("ORCHESTRATOR_", CA, PAIR), **STORE}
    planned = plan({**variables, **GUARDED, **edges, **REDISS})
    tls = {each.name: each.endpoint.tls for each in (*planned.services, *planned.external)}
    assert tls == {
        **dict.fromkeys(("draft", "target", "orchestrator"), ClientFiles(*files)),
        "redis": ClientFiles(files[0]),
    }
    # They run in another folder.
    settings = load_settings({**variables, **GUARDED, **edges, **REDISS, "TANDEM_CALLERS_FILE": "callers.toml"})
    assert settings.environment["TANDEM_TLS_KEY"] == files[2]
    assert settings.environment["TANDEM_CALLERS_FILE"] == str(certificates / "callers.toml")
    recorded = choices(settings)
    assert recorded["tls TANDEM_TLS_WORKER_KEY"] == files[2]
    assert from_record(settings.encryption.on_record(), "target") == ClientFiles(*files)


def test_what_runs_elsewhere_may_be_encrypted_alone(variables, certificates):
    outside = {"TANDEM_DRAFT_ADDRESSES": "a:1", "TANDEM_TARGET_ADDRESSES": "b:1"}
    planned = plan({**variables, **outside, **WORKERS})
    tls = {each.name: bool(each.endpoint.tls.ca) for each in (*planned.services, *planned.external)}
    assert tls == {"draft": True, "target": True, "orchestrator": False, "redis": False}
    planned = plan({**variables, **CALLERS, **WORKERS, "TANDEM_ORCHESTRATOR_ADDRESS": "far:5"})
    assert planned.external[0].endpoint.tls == ClientFiles(str(certificates / "ca.pem"))


@pytest.mark.parametrize("url", ["localhost:6379", "http://db:6379", "redis://db:port/0", "secret@db"])
def test_what_is_no_store_is_found_before_anything_starts(variables, url):
    with pytest.raises(CliError, match=r"TANDEM_REDIS_URL.*expected redis://") as refusal:
        load_settings({**variables, "TANDEM_REDIS_URL": url})
    assert refusal.value.exit_code == 2
    assert "secret" not in str(refusal.value)


def test_a_port_alone_is_an_address_of_every_port_and_nothing_is_unset(variables):
    asked = {"TANDEM_HTTP_LISTEN": "8000", "TANDEM_DRAFT_METRICS_LISTEN": ":9100", "TANDEM_NUM_SPECULATIVE_TOKENS": ""}
    settings = load_settings({**variables, **asked})
    assert "TANDEM_NUM_SPECULATIVE_TOKENS" not in settings.environment
    assert settings.environment["TANDEM_HTTP_LISTEN"] == "127.0.0.1:8000"
    listens = {spec.name: spec.further_listens for spec in plan_stack(settings).services}
    assert listens["orchestrator"] == {"TANDEM_HTTP_LISTEN": Address("127.0.0.1", 8000)}
    assert listens["draft"] == {"TANDEM_DRAFT_METRICS_LISTEN": Address("127.0.0.1", 9100)}
    assert listens["target"] == listens["redis"] == {}
    with pytest.raises(CliError, match="TANDEM_HTTP_LISTEN"):
        load_settings({**variables, "TANDEM_HTTP_LISTEN": "nowhere"})


def test_a_variable_that_nothing_reads_is_said(variables):
    assert list(misspelt({**variables, "TANDEM_TOKEN": "t", "TANDEM_DRAFT_SLOTS": "2", "HOME": "h"})) == []
    (line,) = misspelt({**variables, "TANDEM_NUM_SPECULATIV_TOKENS": "7"})
    assert line.startswith("TANDEM_NUM_SPECULATIV_TOKENS is no setting")
    assert line.endswith("TANDEM_NUM_SPECULATIVE_TOKENS is one")


def test_a_draft_has_ngrams_beside_its_model_unless_another_way_is_named(variables):
    def method(**asked: str) -> str:
        plan = plan_stack(load_settings({**variables, **asked}))
        return next(each for each in plan.services if each.name == "draft").environment["TANDEM_DRAFT_METHOD"]

    assert method() == "model+ngram"
    assert method(TANDEM_DRAFT_METHOD="model") == "model"


def test_only_the_demos_pair_on_one_machine_chooses_its_gamma_by_default(monkeypatch):
    # A checkout may be without the target.
    monkeypatch.setattr(plan_of_stack, "_require_model", lambda settings, name: None)

    def adaptive(**asked: str) -> str | None:
        services = plan_stack(load_settings(asked)).services
        return next(each for each in services if each.name == "orchestrator").environment.get(
            "TANDEM_ADAPTIVE_SPECULATIVE_TOKENS"
        )

    assert adaptive() == "true"
    # What is named otherwise is left to the environment, which the services have too.
    assert adaptive(TANDEM_NUM_SPECULATIVE_TOKENS="4") is None
    assert adaptive(TANDEM_ADAPTIVE_SPECULATIVE_TOKENS="false") is None
    assert adaptive(TANDEM_TARGET_MODEL="org/name") is None
    assert adaptive(TANDEM_DRAFT_ADDRESSES="a:1") is None


def test_what_reaches_the_services_is_on_record_but_for_what_may_be_secret(variables):
    asked = {"TANDEM_DRAFT_METHOD": "ngram", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://j:4317"}
    unrecorded = {"OTEL_EXPORTER_OTLP_HEADERS": "key=secret", "TANDEM_TOKEN": "secret", "TANDEM_READY_TIMEOUT": "9"}
    recorded = choices(load_settings({**variables, **asked, **unrecorded}))
    assert {name: value for name, value in recorded.items() if name.startswith("setting ")} == {
        f"setting {name}": value for name, value in asked.items()
    }


def test_who_names_no_setting_takes_any():
    running = {"model draft": "m", "setting TANDEM_DRAFT_SLOTS": "2"}
    assert differing(running, {"model draft": "m"}, all_of_them=False) == []
    assert len(differing(running, {"model draft": "m"})) == 1
    assert len(differing(running, {**running, "setting TANDEM_DRAFT_SLOTS": "3"}, all_of_them=False)) == 1
    assert len(differing(running, {**running, "model draft": "o"}, all_of_them=False)) == 1


def test_no_password_gets_on_record(variables):
    variables["TANDEM_REDIS_URL"] = "rediss://user:secret@db:6379/0"
    recorded = choices(load_settings(variables))
    assert "secret" not in str(recorded)
    assert mask_password("redis://:secret@db/0") == "redis://:***@db/0"
    assert mask_password("redis://u:pw@db/0?a=1&Password=s&b=2") == "redis://u:***@db/0?a=1&Password=***&b=2"
    assert mask_password("a:1,b:2") == "a:1,b:2"


def test_differences_are_told_both_ways():
    assert differing({"model draft": "a"}, {"model draft": "a"}) == []
    assert differing({"a": "1"}, {"b": "2"}) == ["a: 1 runs, none was asked for", "b: none runs, 2 was asked for"]


def test_the_end_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert last_lines(log, 2) == ["(empty)"]
    log.write_bytes(b"1\n2\n\xff3\n")
    assert last_lines(log, 2) == ["2", "\ufffd3"]


def test_help_needs_nothing(capsys):
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(f"    {command} " in out for command in ("up", "down", "status", "demo", "generate"))
