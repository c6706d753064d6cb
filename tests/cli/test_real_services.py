"""The commands with the real services and a small real pair."""

from __future__ import annotations

import json

import pytest

from tests.cli.test_stack import FakeStack, stack  # noqa: F401 (a fixture)
from tests.support.services import MODELS


@pytest.fixture
def real(stack: FakeStack) -> FakeStack:  # noqa: F811
    stack.module = "tandem.cli"
    stack.variables["TANDEM_TARGET_MODEL"] = str(MODELS / "tiny-target")
    stack.variables["TANDEM_DRAFT_MODEL"] = str(MODELS / "tiny-draft")
    stack.variables["TANDEM_READY_TIMEOUT"] = "120"
    return stack


def test_demo(real):
    code, out, err = real.run("demo", "--raw", "--max-tokens=40", "--ignore-eos", "def main(")
    assert (code, err) == (0, "")
    assert "both texts are equal, token for token" in out
    assert "acceptance at position 2" in out
    assert real.listening() == set()


def test_up_and_generate(real):
    code, _, err = real.run("up")
    assert (code, err) == (0, "")
    answers = []
    for gamma in (0, 2):
        options = ("--raw", "--temperature=0", "--max-tokens=32", "--ignore-eos", f"--gamma={gamma}")
        code, out, err = real.run("generate", "--json", *options, "import os\n\n")
        assert (code, err) == (0, "")
        answers.append(json.loads(out))
    plain, speculative = answers
    assert len(plain["token_ids"]) == 32
    assert plain["token_ids"] == speculative["token_ids"]
    assert set(plain["kinds"]) == {"bonus"}
    assert speculative["speculation"]["rounds"] < 32
    assert real.run("generate", "--raw", "--top-p=7", "x")[0] == 1
    assert "top_p" in real.run("generate", "--raw", "--top-p=7", "x")[2]


def test_a_broken_model_is_reported(real, tmp_path):
    # `model` is a folder with an empty config.json. The tokenizer is another one's: else the orchestrator, which starts beside
    # the target, may end first.
    broken, tokenizer = str(tmp_path / "model"), str(MODELS / "tiny-target")
    code, _, err = real.run("up", TANDEM_TARGET_MODEL=broken, TANDEM_TOKENIZER=tokenizer)
    assert code == 1
    assert "target exited with status" in err
    assert "TANDEM_TARGET_MODEL" in err
    assert real.listening() == set()
