"""`tandem generate` against a scripted orchestrator, in this process and as a real one."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from google.rpc import code_pb2, error_details_pb2

from tandem.cli.arguments import build_parser
from tandem.cli.main import main
from tandem.cli.request import FLAGS
from tandem.v1 import orchestrator_pb2 as pb


@pytest.fixture
def run(orchestrator, tmp_path, capsys):
    def run_it(*arguments: str) -> tuple[int, str, str]:
        environment = {"TANDEM_ORCHESTRATOR_ADDRESS": orchestrator.address, "TANDEM_HOME": str(tmp_path)}
        code = main(["generate", *arguments], environment)
        return code, *capsys.readouterr()

    return run_it


def test_only_the_text_goes_to_a_pipe(run, orchestrator):
    assert run("Why?") == (0, "The sky is\nblue.", "")
    (request,) = orchestrator.requests
    assert [(message.role, message.content) for message in request.messages.messages] == [("user", "Why?")]
    assert not request.HasField("temperature")


def test_every_option_reaches_its_field(run, orchestrator):
    code, _, _ = run(
        *("--raw", "--max-tokens=9", "--min-tokens=1", "--temperature=0.5", "--top-k=3", "--top-p=0.9", "--min-p=0.1"),
        *("--seed=18446744073709551615", "--gamma=0", "--method=coupled", "--stop=x", "--stop=y", "--ignore-eos"),
        *("--request-id=abc", "text"),
    )
    assert code == 0
    (request,) = orchestrator.requests
    assert request.text == "text"
    assert (request.max_tokens, request.min_tokens, request.top_k) == (9, 1, 3)
    assert request.temperature == 0.5
    assert request.top_p == pytest.approx(0.9)
    assert request.min_p == pytest.approx(0.1)
    assert request.seed == 2**64 - 1
    assert request.HasField("num_speculative_tokens")
    assert request.num_speculative_tokens == 0
    assert (list(request.stop), request.ignore_eos, request.request_id) == (["x", "y"], True, "abc")


def test_gamma_may_be_left_to_the_orchestrator(run, orchestrator):
    assert run("--gamma=auto", "Why?")[0] == 0
    (request,) = orchestrator.requests
    assert request.adaptive_speculative_tokens
    assert not request.HasField("num_speculative_tokens")


def test_a_request_is_resumed_by_its_name_alone(run, orchestrator):
    assert run("--resume=abc", "--offset=7") == (0, "The sky is\nblue.", "")
    (request,) = orchestrator.requests
    assert (request.request_id, request.token_offset) == ("abc", 7)
    assert request.WhichOneof("prompt") is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["--resume=a", "text"],
        ["--resume=a", "--top-k=3"],
        ["--offset=3", "text"],
        ["--resume=a", "--request-id=b"],
        ["--resume=a", "--raw"],
    ],
)
def test_a_resumption_takes_nothing_else(run, orchestrator, arguments):
    assert run(*arguments)[0] == 2
    assert not orchestrator.requests


def test_adjustments_of_the_logits_reach_their_fields(run, orchestrator):
    code, _, _ = run(
        *("--repetition-penalty=1.5", "--presence-penalty=-0.5", "--frequency-penalty=0.25", "--stop-token-id=9"),
        *("--logit-bias=7=-2.5", "--logit-bias=0=1", "--ban-token-id=3", "--ban-token-id=4", "--allow-token-id=5"),
        *("--bad-word=one", "--bad-word=two words", "--logprobs=3", "--logprobs-mode=processed"),
        *("--keep-special-tokens", "--json", "text"),
    )
    assert code == 0
    (request,) = orchestrator.requests
    assert (request.repetition_penalty, request.presence_penalty, request.frequency_penalty) == (1.5, -0.5, 0.25)
    assert dict(request.logit_bias) == {7: -2.5, 0: 1.0}
    assert (list(request.banned_token_ids), list(request.allowed_token_ids)) == ([3, 4], [5])
    assert (list(request.bad_words), list(request.stop_token_ids)) == (["one", "two words"], [9])
    assert (request.logprobs, request.top_logprobs, request.logprobs_mode) == (True, 3, 2)
    assert request.HasField("skip_special_tokens")
    assert not request.skip_special_tokens


def test_several_completions_are_lines_of_json(run, orchestrator):
    one = list(orchestrator.responses)
    other = [type(response).FromString(response.SerializeToString()) for response in one]
    for response in other:
        response.index = 1
    other[-1].text = "!"
    orchestrator.responses = [*one[:1], *other, *one[1:]]
    code, out, _ = run("Why?", "--json", "--n=2")
    assert code == 0
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["The sky is\nblue.", "The sky is\nblue!"]
    assert orchestrator.requests[0].n == 2
    assert run("Why?", "--n=2")[0] == 2


def test_json_has_log_probabilities_if_there_are_any(run, orchestrator):
    for response in orchestrator.responses:
        for token in response.tokens:
            token.logprob = -0.5
            token.top_logprobs.add(token_id=9, logprob=-0.25)
    data = json.loads(run("Why?", "--json", "--logprobs=1")[1])
    assert data["logprobs"] == [-0.5] * 5
    assert data["top_logprobs"] == [{"9": -0.25}] * 5
    assert run("Why?", "--json", "--logprobs=0")[0] == 0
    assert [(each.logprobs, each.top_logprobs) for each in orchestrator.requests] == [(True, 1), (True, 0)]


def test_the_prompt_comes_from_standard_input(run, orchestrator, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n\n"))
    assert run("--raw")[0] == 0
    assert orchestrator.requests[0].text == "two\nlines\n"


def test_json_is_one_object(run):
    code, out, err = run("Why?", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["text"] == "The sky is\nblue."
    assert data["token_ids"] == [1, 2, 3, 4, 5]
    assert data["kinds"] == ["accepted", "accepted", "bonus", "accepted", "recovered"]
    assert data["finish_reason"] == "stop"
    assert data["usage"] == {"prompt_tokens": 5, "completion_tokens": 5}
    assert data["speculation"]["rounds"] == 2
    assert (data["seed"], data["request_id"]) == (7, "r-1")


def test_kinds_and_statistics(run):
    code, out, err = run("Why?", "--kinds", "--stats")
    assert code == 0
    assert out == "The[A] sky[A] is[B]\\n[A]\nblue[R]."
    assert "[A] accepted from the draft" in err
    assert "tokens per round" in err
    assert "mean acceptance length" in err
    assert "2.50" in err


def test_a_refused_field_is_one_clear_line(run, orchestrator):
    orchestrator.fail_invalid()
    code, out, err = run("Why?")
    assert (code, out) == (1, "")
    assert err == "tandem: INVALID_ARGUMENT: the request is not valid (top_p: must be in (0, 1])\n"


def test_a_refused_field_is_said_with_its_flag_where_that_is_called_otherwise(run, orchestrator):
    violation = error_details_pb2.BadRequest.FieldViolation(
        field="num_speculative_tokens", description="must be 0 to 16"
    )
    details = error_details_pb2.BadRequest(field_violations=[violation])
    orchestrator.fail(code_pb2.INVALID_ARGUMENT, "num_speculative_tokens: must be 0 to 16", details)
    said = "tandem: INVALID_ARGUMENT: num_speculative_tokens: must be 0 to 16 (--gamma)\n"
    assert run("--gamma=99", "Why?") == (1, "", said)


@pytest.mark.parametrize("field", sorted(FLAGS))
def test_such_fields_and_flags_are_there(field):
    name, _, form = field.partition(".")
    found = pb.GenerateRequest.DESCRIPTOR.fields_by_name[name]
    assert not form or form in found.message_type.fields_by_name
    subparsers = next(each for each in build_parser()._actions if each.dest == "command")
    assert FLAGS[field] in subparsers.choices["generate"]._option_string_actions


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-tokens=5"], "cut off after 5 tokens by --max-tokens (finish reason: length)"),
        ([], "cut off after 5 tokens, the most that it may have (finish reason: length)"),
        (["--max-tokens=5", "--json-object"], "(finish reason: length): only the beginning of the form asked for"),
    ],
)
def test_an_answer_that_is_cut_off_is_said_to_be(run, orchestrator, arguments, said):
    orchestrator.responses[-1].finish.reason = pb.FINISH_REASON_LENGTH
    code, out, err = run("Why?", *arguments)
    assert (code, out) == (0, "The sky is\nblue.")
    assert err.startswith("tandem: cut off after 5 tokens")
    assert err.endswith(f"{said}\n")
    # The object has it already.
    assert run("Why?", "--json", *arguments)[2] == ""


def test_the_services_own_reason_is_kept(run, orchestrator):
    orchestrator.fail(code_pb2.UNAVAILABLE, "the target did not come back")
    assert run("Why?")[2] == "tandem: UNAVAILABLE: the target did not come back\n"


def test_the_time_that_is_up_is_the_callers_own(run, orchestrator):
    orchestrator.fail(code_pb2.DEADLINE_EXCEEDED, "Stream removed (Deadline Exceeded)")
    assert run("Why?")[2] == "tandem: DEADLINE_EXCEEDED: the time of --timeout is up before the answer is whole\n"


def test_nobody_listens(free_port, capsys):
    assert main(["generate", "hi", "--address", f"127.0.0.1:{free_port()}"], {}) == 1
    assert "`tandem up` starts one" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--raw", "--system=s", "x"],
        ["--address=nowhere", "x"],
        ["--logprobs=2", "x"],
        ["--json", "--stats", "x"],
        ["--json", "--kinds", "x"],
        ["--json-schema=no-such-file", "x"],
    ],
)
def test_what_cannot_be_sent_is_a_usage_error(run, arguments, orchestrator):
    code, _, err = run(*arguments)
    assert code == 2
    assert err.startswith("tandem: ")
    assert not orchestrator.requests


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--max-token", "5", "there is no option --max-token; --max-tokens is one"),
        ("--seed", "-1", "argument --seed: '-1' is no whole number from 0 up"),
        ("--top-k", "99999999999", "argument --top-k: '99999999999' is more than fits into 32 bits"),
        ("--seed", str(2**64), "is more than fits into 64 bits"),
        ("--gamma", "x", "argument --gamma: 'x' is no whole number from 0 up, nor auto"),
        ("--gamma", "-1", "argument --gamma: '-1' is no whole number"),
        ("--logit-bias", "foo", "argument --logit-bias: 'foo' is not ID=BIAS"),
        ("--temperature", "hot", "argument --temperature: 'hot' is no number"),
    ],
)
def test_what_is_no_value_of_a_flag_is_said_with_its_name(flag, value, said, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["generate", f"{flag}={value}", "x"], {})
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: tandem generate ")
    assert said in err


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("--json-schema=FILE", "json_schema", '{"type": "object"}'),
        ("--grammar=FILE", "grammar", '{"type": "object"}'),
        ("--regex=[a-z]+", "regex", "[a-z]+"),
        ("--json-object", "json_object", True),
    ],
)
def test_the_form_of_the_output_reaches_its_field(run, orchestrator, tmp_path, flag, field, value):
    file = tmp_path / "form"
    file.write_text('{"type": "object"}')
    assert run(flag.replace("FILE", str(file)), "x")[0] == 0
    (request,) = orchestrator.requests
    assert request.structured_output.WhichOneof("form") == field
    assert getattr(request.structured_output, field) == value


def test_the_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"], {})
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("tandem ")


def _process(orchestrator, tmp_path, *arguments: str, errors: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TANDEM_ORCHESTRATOR_ADDRESS": orchestrator.address, "TANDEM_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "tandem.cli", "generate", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors)


def test_ctrl_c_cancels_the_call(orchestrator, tmp_path):
    orchestrator.pause_seconds = 60
    process = _process(orchestrator, tmp_path, "Why?")
    assert process.stdout.read(10) == b"The sky is"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"tandem: interrupted\n")
    deadline = time.monotonic() + 60
    while not orchestrator.cancelled and time.monotonic() < deadline:
        time.sleep(0.02)
    assert orchestrator.cancelled == 1


def test_more_of_them_end_it_without_a_word(orchestrator, tmp_path):
    moments = random.Random(7)
    orchestrator.pause_seconds = 600
    for _ in range(4):
        process = _process(orchestrator, tmp_path, "Why?")
        assert process.stdout.read(10) == b"The sky is"
        for _ in range(4):
            time.sleep(moments.random() * 0.002)  # as a person's fingers have it; nothing is awaited by this
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        # From the second one on the system may end it, at any byte of what it says.
        assert process.returncode in (130, -signal.SIGINT)
        assert b"tandem: interrupted\n".startswith(err)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_system_may_end_it_too(orchestrator, tmp_path, number, code):
    orchestrator.pause_seconds = 600
    process = _process(orchestrator, tmp_path, "Why?")
    assert process.stdout.read(10) == b"The sky is"
    process.send_signal(number)
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == code


def test_an_error_is_not_glued_to_the_text_before_it(orchestrator, tmp_path):
    orchestrator.pause_seconds = 60
    process = _process(orchestrator, tmp_path, "Why?", errors=subprocess.STDOUT)
    assert process.stdout.read(10) == b"The sky is"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"\ntandem: interrupted\n")


def test_nor_is_what_is_said_of_its_end(orchestrator, tmp_path):
    orchestrator.responses[-1].finish.reason = pb.FINISH_REASON_LENGTH
    out, _ = _process(orchestrator, tmp_path, "Why?", errors=subprocess.STDOUT).communicate(timeout=60)
    assert out.startswith(b"The sky is\nblue.\ntandem: cut off after 5 tokens")


def test_a_reader_that_goes_away_is_no_traceback(orchestrator, tmp_path):
    orchestrator.pause_seconds = 0.5
    process = _process(orchestrator, tmp_path, "Why?")
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
