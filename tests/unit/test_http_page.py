"""The page's own script, run by node: how it reads a stream and what it makes of the rounds."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from orchestrator.http import page
from tests.support.services import REPOSITORY

HTML = (REPOSITORY / "orchestrator" / "http" / "page.html").read_text()


def run(tmp_path: Path, expression: str) -> Any:
    """The value of an expression after the page's script, which without a document only defines its functions."""
    script = re.search(r"<script>(.*?)</script>", HTML, re.DOTALL)
    assert script is not None
    program = tmp_path / "page.js"
    program.write_text(f"{script[1]}\nPromise.resolve({expression}).then((v) => console.log(JSON.stringify(v)));\n")
    done = subprocess.run(["node", program], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def chunk(kinds: str, drafted: int) -> dict[str, Any]:
    names = {"a": "accepted", "r": "recovered", "b": "bonus"}
    tokens = [{"id": 1, "kind": names[kind], "text": "x"} for kind in kinds]
    return {"choices": [{"index": 0, "delta": {"content": "x"}, "tokens": tokens, "draft_tokens": drafted}]}


def test_a_stream_is_read_however_it_is_cut(tmp_path: Path) -> None:
    rounds = [chunk("aab", 2), {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, chunk("ar", 3)]
    stream = "".join(f"data: {json.dumps(each)}\n\n" for each in rounds) + "data: [DONE]\n\n"
    # `fetch` is the network here; it gives the stream in pieces of seven bytes, characters of several bytes among them.
    stream = stream.replace('"x"', '"ü"')
    fake = (
        f"(async () => {{ const bytes = new TextEncoder().encode({json.dumps(stream)}); let at = 0; let sent = null;"
        " globalThis.fetch = async (path, options) => { sent = [path, JSON.parse(options.body), options.headers];"
        " return { ok: true, body: { getReader: () => ({ read: async () => at >= bytes.length ? { done: true } :"
        " { done: false, value: bytes.slice(at, (at += 7)) } }) } }; }; const seen = [];"
        " await generate({ prompt: 'p', kind: 'chat', maxTokens: 5, temperature: 0, gamma: '3', token: 't' }, null,"
        " (round) => seen.push(round)); return [sent, seen, acceptanceOf(seen)]; })()"
    )
    sent, seen, acceptance = run(tmp_path, fake)
    assert sent[0] == "v1/chat/completions"
    assert sent[1]["messages"] == [{"role": "user", "content": "p"}]
    assert (sent[1]["num_speculative_tokens"], sent[1]["stream"], sent[1]["return_tokens"]) == (3, True, True)
    assert sent[2]["authorization"] == "Bearer t"
    assert [(each["drafted"], each["accepted"], len(each["tokens"])) for each in seen] == [(2, 2, 3), (3, 1, 2)]
    assert seen[0]["tokens"][0]["text"] == "ü"
    assert acceptance == [1.0, 0.6]


def test_what_it_asks_for_is_a_request(tmp_path: Path) -> None:
    from orchestrator.http.inquiry import read_inquiry

    for kind, name in (("chat", "chat"), ("text", "completion")):
        for gamma in ("", "auto", "0"):
            form = {"prompt": "p", "kind": kind, "maxTokens": 5, "temperature": 0.5, "gamma": gamma, "token": ""}
            asked = run(tmp_path, f"requestOf({json.dumps(form)})")
            inquiry = read_inquiry(name, asked["body"], "id")  # type: ignore[arg-type]
            assert inquiry.stream
            assert inquiry.return_tokens
            assert inquiry.request.adaptive_speculative_tokens == (gamma == "auto")
            assert inquiry.request.HasField("num_speculative_tokens") == (gamma == "0")


def test_its_policy_lets_its_own_script_run_and_no_other() -> None:
    response = page.load()
    policy = response.headers["content-security-policy"]
    assert response.body.decode() == HTML
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2
    # Neither attribute would run, or count, under such a policy.
    assert not re.search(r"<[^>]*\s(style|on\w+)=", HTML)
