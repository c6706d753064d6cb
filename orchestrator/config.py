"""What an operator can set on the orchestrator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tandem.config import address, flag, is_address, parse_list, seconds, setting, whole_number
from tandem.service_settings import ServiceSettings
from tandem.transport_security import ClientFiles

from .session_store import Durability

MAX_REPLICAS = 16
"""Of the store that a commit may have to wait for."""


def _durability(text: str) -> bool:
    try:
        return Durability.parse(text).replicas <= MAX_REPLICAS
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestratorConfig(ServiceSettings):
    """The Tandem orchestrator: runs the rounds of speculative decoding and serves the public API."""

    role: ClassVar[str] = "orchestrator"

    target_addresses: tuple[str, ...] = setting(
        "TANDEM_TARGET_ADDRESSES",
        help="target replicas, comma-separated host:port",
        parse=parse_list,
        check=lambda value: bool(value) and all(map(is_address, value)),
        expected="at least one host:port",
    )
    tokenizer: str = setting("TANDEM_TOKENIZER", help="name or folder of the target's tokenizer and generation config")
    redis_url: str = setting(
        "TANDEM_REDIS_URL",
        help="the store of committed tokens: redis://, redis+sentinel:// or redis+cluster://; over TLS rediss…",
    )
    draft_addresses: tuple[str, ...] = setting(
        "TANDEM_DRAFT_ADDRESSES",
        (),
        help="draft replicas, comma-separated host:port; none: plain decoding",
        parse=parse_list,
        check=lambda value: all(map(is_address, value)),
    )
    tokenizer_revision: str = setting(
        "TANDEM_TOKENIZER_REVISION", "", help="revision of the tokenizer, if it is a name"
    )
    tokenizer_gguf_file: str = setting(
        "TANDEM_TOKENIZER_GGUF_FILE",
        "",
        help="GGUF file that holds the tokenizer, where there are no files of its own; reading it needs torch",
    )
    listen: str = address("TANDEM_ORCHESTRATOR_LISTEN", "127.0.0.1:50051", help="host:port of the public API")
    http_listen: str = address(
        "TANDEM_HTTP_LISTEN", "", help="host:port of the OpenAI-compatible HTTP API; empty: gRPC only"
    )
    served_model_name: str = setting(
        "TANDEM_SERVED_MODEL_NAME", "", help="the model's name over HTTP; empty: the target's own"
    )
    tls_worker_ca: str = setting(
        "TANDEM_TLS_WORKER_CA",
        "",
        help="PEM file of the CA of drafts and targets; empty: they are reached in plain text",
    )
    tls_worker_certificate: str = setting(
        "TANDEM_TLS_WORKER_CERTIFICATE", "", help="PEM file of the certificate that they are shown"
    )
    tls_worker_key: str = setting("TANDEM_TLS_WORKER_KEY", "", help="PEM file of its key")
    tls_redis_ca: str = setting(
        "TANDEM_TLS_REDIS_CA", "", help="PEM file of the store's CA, for rediss://; empty: the system's CAs"
    )
    tls_redis_certificate: str = setting(
        "TANDEM_TLS_REDIS_CERTIFICATE", "", help="PEM file of the certificate that the store is shown"
    )
    tls_redis_key: str = setting("TANDEM_TLS_REDIS_KEY", "", help="PEM file of its key")
    callers_file: str = setting(
        "TANDEM_CALLERS_FILE", "", help="TOML file of those who may call, and their tokens; empty: everybody may"
    )
    num_speculative_tokens: int = whole_number(
        "TANDEM_NUM_SPECULATIVE_TOKENS", 4, least=0, most=64, help="gamma of requests that don't set it"
    )
    adaptive_speculative_tokens: bool = flag(
        "TANDEM_ADAPTIVE_SPECULATIVE_TOKENS",
        False,
        help="choose gamma anew for each round of requests that don't set it",
    )
    max_speculative_tokens: int = whole_number(
        "TANDEM_MAX_SPECULATIVE_TOKENS", 16, least=0, most=64, help="largest gamma a request may ask for"
    )
    look_ahead: bool = flag(
        "TANDEM_LOOK_AHEAD",
        False,
        help="have the draft propose the token after the block too, to take the place of the bonus token",
    )
    max_tokens: int = whole_number("TANDEM_MAX_TOKENS", 4096, least=1, help="most tokens one request may generate")
    max_prompt_characters: int = whole_number(
        "TANDEM_MAX_PROMPT_CHARACTERS", 1_000_000, least=1, help="longest prompt that is encoded at all"
    )
    max_running_requests: int = whole_number(
        "TANDEM_MAX_RUNNING_REQUESTS", 32, least=1, help="requests decoded at the same time"
    )
    max_waiting_requests: int = whole_number(
        "TANDEM_MAX_WAITING_REQUESTS",
        256,
        least=0,
        help="requests that may wait for a place; more are refused with RESOURCE_EXHAUSTED",
    )
    max_waiting_seconds: float = seconds("TANDEM_MAX_WAITING_SECONDS", 60.0, help="longest wait for a place")
    draft_start_seconds: float = seconds(
        "TANDEM_DRAFT_START_SECONDS",
        10.0,
        help="how long the first readiness waits for a draft, once all else is there",
    )
    draft_timeout_seconds: float = seconds(
        "TANDEM_DRAFT_TIMEOUT_SECONDS",
        1.0,
        above=0,
        help="how long a round waits for the draft before it goes on without",
    )
    draft_backoff_seconds: float = seconds(
        "TANDEM_DRAFT_BACKOFF_SECONDS",
        1.0,
        help="how long a request decodes plainly after its draft failed, before it tries again",
    )
    target_timeout_seconds: float = seconds(
        "TANDEM_TARGET_TIMEOUT_SECONDS", 60.0, above=0, help="how long a round waits for one answer of the target"
    )
    target_retry_seconds: float = seconds(
        "TANDEM_TARGET_RETRY_SECONDS",
        30.0,
        help="how long a request that runs waits for a target to come back before it ends UNAVAILABLE",
    )
    reader_timeout_seconds: float = seconds(
        "TANDEM_READER_TIMEOUT_SECONDS",
        60.0,
        above=0,
        help="how long a caller may leave its stream unread before the request is ended",
    )
    trace_slow_seconds: float = seconds(
        "TANDEM_TRACE_SLOW_SECONDS",
        30.0,
        help="a request that takes longer is traced whatever the sampler says, as one that fails or is degraded",
    )
    store_retry_seconds: float = seconds(
        "TANDEM_STORE_RETRY_SECONDS", 5.0, help="how long a commit is retried while the store is away"
    )
    store_durability: str = setting(
        "TANDEM_STORE_DURABILITY",
        "memory",
        help="what has to hold a commit before its tokens are sent: memory, disk, replicas=N or disk+replicas=N",
        check=_durability,
        expected="memory, disk, replicas=N or disk+replicas=N",
    )
    store_timeout_seconds: float = seconds(
        "TANDEM_STORE_TIMEOUT_SECONDS", 2.0, above=0, help="how long one answer of the store may take"
    )
    running_ttl_seconds: int = whole_number(
        "TANDEM_RUNNING_TTL_SECONDS", 900, least=1, help="expiry of a running request's state, refreshed by each commit"
    )
    finished_ttl_seconds: int = whole_number(
        "TANDEM_FINISHED_TTL_SECONDS", 300, least=1, help="how long a finished request's state is kept"
    )
    resume_seconds: float = seconds(
        "TANDEM_RESUME_SECONDS",
        60.0,
        most=86400,
        help="how long a request that was named by its caller can be resumed after its connection broke",
    )
    drain_seconds: float = seconds(
        "TANDEM_DRAIN_SECONDS", 20.0, help="how long running requests may go on after SIGTERM"
    )

    def worker_files(self) -> ClientFiles:
        """What to reach drafts and targets with."""
        return ClientFiles(self.tls_worker_ca, self.tls_worker_certificate, self.tls_worker_key)

    def redis_files(self) -> ClientFiles:
        """What to reach the store with."""
        return ClientFiles(self.tls_redis_ca, self.tls_redis_certificate, self.tls_redis_key)
