#!/usr/bin/env bash
# Sends one request to the orchestrator of a cluster through a port-forward, and fails unless it is answered.
# Says whether drafts were accepted on the way; with EXPECT=speculation or EXPECT=plain it fails if that is not so.
# Where the orchestrator serves TLS or wants a token: TANDEM_TLS_ORCHESTRATOR_CA, …_CERTIFICATE, …_KEY and TANDEM_TOKEN, as for the command line.
set -euo pipefail
cd "$(dirname "$0")/.."

bin=${BIN:-.venv/bin}
kubectl=${KUBECTL:-kubectl}
namespace=${NAMESPACE:-tandem}
log=$(mktemp)
"$kubectl" --namespace "$namespace" port-forward service/orchestrator :50051 >"$log" 2>&1 &
forward=$!
trap 'kill "$forward" 2>/dev/null || true; rm -f "$log"' EXIT
for _ in $(seq 100); do
  port=$(sed -n 's/^Forwarding from 127.0.0.1:\([0-9]*\) .*/\1/p' "$log")
  if [ -n "$port" ] || ! kill -0 "$forward" 2>/dev/null; then break; fi
  sleep 0.1
done
if [ -z "$port" ]; then
  echo "no port-forward to service/orchestrator in namespace $namespace:" >&2
  cat "$log" >&2
  exit 1
fi

host=127.0.0.1
# The name that certificates have for this end of a port-forward.
if [ -n "${TANDEM_TLS_ORCHESTRATOR_CA:-}" ]; then host=localhost; fi
answer=$("$bin/tandem" generate --address "$host:$port" --timeout 120 --max-tokens 32 --temperature 0 \
  --ignore-eos --raw --json "def main():")
EXPECT=${EXPECT:-} "$bin/python" - "$answer" <<'PYTHON'
import json, os, sys

answer = json.loads(sys.argv[1])
tokens, speculation = answer["usage"]["completion_tokens"], answer["speculation"]
drafted, accepted = sum(speculation["draft_tokens_per_position"]), sum(speculation["accepted_tokens_per_position"])
print(f"answered: {tokens} tokens of {answer['model']}, {accepted} of {drafted} draft tokens accepted")
if tokens != 32:
    sys.exit("error: 32 tokens were asked for")
if {"speculation": not drafted, "plain": bool(drafted)}.get(os.environ["EXPECT"], False):
    sys.exit(f"error: expected {os.environ['EXPECT']}")
PYTHON
