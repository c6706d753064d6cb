"""The commands with the real services and a small real pair."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_stack import FakeStack, stack  # noqa: F401 (a fixture)
from tests.support.authority import Authority, server_context
from tests.support.redis_servers import RedisServer
from tests.support.services import MODELS
from tests.support.tls_proxy import TlsProxy

pytest_plugins = ("tests.support.redis_fixtures",)

HOST, TOKEN = "127.0.0.1", "token-of-alice-1234567890"


@pytest.fixture
def real(stack: FakeStack) -> FakeStack:  # noqa: F811
    stack.module = "tandem.cli"
    stack.variables["TANDEM_TARGET_MODEL"] = str(MODELS / "tiny-target")
    stack.variables["TANDEM_DRAFT_MODEL"] = str(MODELS / "tiny-draft")
    stack.variables["TANDEM_READY_TIMEOUT"] = "400"
    stack.variables["TANDEM_DRAFT_TIMEOUT_SECONDS"] = "60"  # on a busy machine a round would now and then go without
    return stack


def test_demo(real):
    code, out, err = real.run("demo", "--raw", "--max-tokens=40", "--ignore-eos", "def main(")
    assert (code, err) == (0, "")
    for role in ("draft", "target"):
        assert re.search(rf"^{role} ready after [0-9.]+ s, context 1,024 tokens$", out, re.MULTILINE)
    assert "both texts are equal, token for token" in out
    assert "acceptance at position 2" in out
    assert real.listening() == set()


@pytest.fixture
def encrypted(real: FakeStack, one_redis_server: RedisServer, tmp_path: Path) -> Iterator[TlsProxy]:
    """Certificates on both sides of every edge, that to the store too, which is somebody else's then; callers have tokens."""
    authority = Authority(tmp_path / "inside")
    ca = str(authority.folder / "ca.pem")
    (certificate, key), caller = authority.issue("service", HOST), authority.issue("caller", "caller.example")
    real.variables |= {"TANDEM_TLS_CERTIFICATE": certificate, "TANDEM_TLS_KEY": key, "TANDEM_TLS_CLIENT_CA": ca}
    for edge, files in {"WORKER": (certificate, key), "REDIS": (certificate, key), "ORCHESTRATOR": caller}.items():
        parts = zip(("CA", "CERTIFICATE", "KEY"), (ca, *files), strict=True)
        real.variables |= {f"TANDEM_TLS_{edge}_{part}": file for part, file in parts}
    callers = tmp_path / "callers.toml"
    callers.write_text(f'[callers.alice]\ntoken = "{TOKEN}"\n')
    real.variables["TANDEM_CALLERS_FILE"] = str(callers)
    with TlsProxy(server_context(ca, certificate, key), one_redis_server.port) as store:
        real.variables["TANDEM_REDIS_URL"] = f"rediss://{HOST}:{store.port}/0"
        yield store
        assert real.run("down")[0] == 0


def test_up_and_generate_with_every_edge_encrypted(real: FakeStack, encrypted: TlsProxy) -> None:
    code, out, err = real.run("up")
    assert (code, err) == (0, "")
    assert "redis ready after" in out
    assert encrypted.accepted > 0
    # What runs is on record with its certificates: the commands for it need not be told again.
    named = {name: value for name, value in real.variables.items() if "_TLS_" in name}
    real.variables = {name: value for name, value in real.variables.items() if name not in named}
    code, out, _ = real.run("status", "--json")
    assert code == 0
    assert [row["state"] for row in json.loads(out)["services"]] == ["ready"] * 3
    sent = ("generate", "--json", "--raw", "--temperature=0", "--max-tokens=32", "--ignore-eos", "import os\n\n")
    answers = []
    for gamma in (0, 2):
        code, out, err = real.run(*sent, f"--gamma={gamma}", TANDEM_TOKEN=TOKEN)
        assert (code, err) == (0, "")
        answers.append(json.loads(out))
    plain, speculative = answers
    assert len(plain["token_ids"]) == 32
    assert set(plain["kinds"]) == {"bonus"}
    assert plain["token_ids"] == speculative["token_ids"]
    assert speculative["speculation"]["rounds"] < 32
    assert speculative["speculation"]["degraded_rounds"] == 0
    code, _, err = real.run("generate", "--raw", "--top-p=7", "x", TANDEM_TOKEN=TOKEN)
    assert (code, "top_p" in err) == (1, True)
    assert "UNAUTHENTICATED" in real.run(*sent)[2]
    another = str(Authority(Path(named["TANDEM_TLS_KEY"]).parent / "outside").folder / "ca.pem")
    code, _, err = real.run(*sent, TANDEM_TOKEN=TOKEN, TANDEM_TLS_ORCHESTRATOR_CA=another)
    assert (code, "UNAVAILABLE" in err) == (1, True)


def test_a_broken_model_is_reported(real, tmp_path):
    # `model` is a folder with an empty config.json. The tokenizer is another one's: else the orchestrator, which starts beside
    # the target, may end first.
    broken, tokenizer = str(tmp_path / "model"), str(MODELS / "tiny-target")
    code, _, err = real.run("up", TANDEM_TARGET_MODEL=broken, TANDEM_TOKENIZER=tokenizer)
    assert code == 1
    assert "target exited with status" in err
    assert "TANDEM_TARGET_MODEL" in err
    assert real.listening() == set()
