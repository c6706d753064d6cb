"""What an operator can set on the orchestrator."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.config import is_address, parse_bool, parse_list, setting
from tandem.transport_security import ClientFiles, ServerFiles

from .session_store import Durability

MAX_REPLICAS = 16
"""Of the store that a commit may have to wait for."""


def _durability(text: str) -> bool:
    try:
        return Durability.parse(text).replicas <= MAX_REPLICAS
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class OrchestratorConfig:
    """The Tandem orchestrator: runs the rounds of speculative decoding and serves the public API."""

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
    listen: str = setting(
        "TANDEM_ORCHESTRATOR_LISTEN", "127.0.0.1:50051", help="host:port of the public API", check=is_address
    )
    http_listen: str = setting(
        "TANDEM_HTTP_LISTEN",
        "",
        help="host:port of the OpenAI-compatible HTTP API; empty: gRPC only",
        check=lambda value: not value or is_address(value),
    )
    served_model_name: str = setting(
        "TANDEM_SERVED_MODEL_NAME", "", help="the model's name over HTTP; empty: the target's own"
    )
    tls_certificate: str = setting(
        "TANDEM_TLS_CERTIFICATE", "", help="PEM file of the certificate to serve with; empty: plain text"
    )
    tls_key: str = setting("TANDEM_TLS_KEY", "", help="PEM file of its key")
    tls_client_ca: str = setting(
        "TANDEM_TLS_CLIENT_CA", "", help="PEM file of the CA whose clients may connect; empty: any may"
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
    metrics_listen: str = setting(
        "TANDEM_ORCHESTRATOR_METRICS_LISTEN",
        "",
        help="host:port for Prometheus; empty: no metrics endpoint",
        check=lambda value: not value or is_address(value),
    )
    health_listen: str = setting(
        "TANDEM_ORCHESTRATOR_HEALTH_LISTEN",
        "",
        help="host:port where health alone is served, in plain text, for probes that speak no TLS; empty: not",
        check=lambda value: not value or is_address(value),
    )
    num_speculative_tokens: int = setting(
        "TANDEM_NUM_SPECULATIVE_TOKENS",
        4,
        help="gamma of requests that don't set it",
        parse=int,
        check=lambda value: 0 <= value <= 16,
        expected="0 to 16",
    )
    adaptive_speculative_tokens: bool = setting(
        "TANDEM_ADAPTIVE_SPECULATIVE_TOKENS",
        False,
        help="choose gamma anew for each round of requests that don't set it",
        parse=parse_bool,
        expected="true or false",
    )
    max_speculative_tokens: int = setting(
        "TANDEM_MAX_SPECULATIVE_TOKENS",
        16,
        help="largest gamma a request may ask for",
        parse=int,
        check=lambda value: 0 <= value <= 64,
        expected="0 to 64",
    )
    look_ahead: bool = setting(
        "TANDEM_LOOK_AHEAD",
        False,
        help="have the draft propose the token after the block too, to take the place of the bonus token",
        parse=lambda text: text.lower() in ("1", "true", "yes", "on"),
    )
    max_tokens: int = setting(
        "TANDEM_MAX_TOKENS",
        4096,
        help="most tokens one request may generate",
        parse=int,
        check=lambda value: value >= 1,
        expected="at least 1",
    )
    max_prompt_characters: int = setting(
        "TANDEM_MAX_PROMPT_CHARACTERS",
        1_000_000,
        help="longest prompt that is encoded at all",
        parse=int,
        check=lambda value: value >= 1,
        expected="at least 1",
    )
    max_running_requests: int = setting(
        "TANDEM_MAX_RUNNING_REQUESTS",
        32,
        help="requests decoded at the same time",
        parse=int,
        check=lambda value: value >= 1,
        expected="at least 1",
    )
    max_waiting_requests: int = setting(
        "TANDEM_MAX_WAITING_REQUESTS",
        256,
        help="requests that may wait for a place; more are refused with RESOURCE_EXHAUSTED",
        parse=int,
        check=lambda value: value >= 0,
        expected="at least 0",
    )
    max_waiting_seconds: float = setting(
        "TANDEM_MAX_WAITING_SECONDS",
        60.0,
        help="longest wait for a place",
        parse=float,
        check=lambda value: value >= 0,
        expected="at least 0",
    )
    draft_start_seconds: float = setting(
        "TANDEM_DRAFT_START_SECONDS",
        10.0,
        help="how long the first readiness waits for a draft, once all else is there",
        parse=float,
        check=lambda value: value >= 0,
        expected="at least 0",
    )
    draft_timeout_seconds: float = setting(
        "TANDEM_DRAFT_TIMEOUT_SECONDS",
        1.0,
        help="how long a round waits for the draft before it goes on without",
        parse=float,
        check=lambda value: value > 0,
        expected="more than 0",
    )
    draft_backoff_seconds: float = setting(
        "TANDEM_DRAFT_BACKOFF_SECONDS",
        1.0,
        help="how long a request decodes plainly after its draft failed, before it tries again",
        parse=float,
        check=lambda value: value >= 0,
        expected="at least 0",
    )
    target_timeout_seconds: float = setting(
        "TANDEM_TARGET_TIMEOUT_SECONDS",
        60.0,
        help="how long a round waits for one answer of the target",
        parse=float,
        check=lambda value: value > 0,
        expected="more than 0",
    )
    target_retry_seconds: float = setting(
        "TANDEM_TARGET_RETRY_SECONDS",
        30.0,
        help="how long a request waits for a target to come back before it ends UNAVAILABLE",
        parse=float,
        check=lambda value: value >= 0,
        expected="at least 0",
    )
    reader_timeout_seconds: float = setting(
        "TANDEM_READER_TIMEOUT_SECONDS",
        60.0,
        help="how long a caller may leave its stream unread before the request is ended",
        parse=float,
        check=lambda value: value > 0,
        expected="more than 0",
    )
    trace_slow_seconds: float = setting(
        "TANDEM_TRACE_SLOW_SECONDS",
        30.0,
        help="a request that takes longer is traced whatever the sampler says, as one that fails or is degraded",
        parse=float,
        check=lambda value: value >= 0,
        expected="at least 0",
    )
    store_retry_seconds: float = setting(
        "TANDEM_STORE_RETRY_SECONDS",
        5.0,
        help="how long a commit is retried while the store is away",
        parse=float,
        check=lambda value: value >= 0,
        expected="at least 0",
    )
    store_durability: str = setting(
        "TANDEM_STORE_DURABILITY",
        "memory",
        help="what has to hold a commit before its tokens are sent: memory, disk, replicas=N or disk+replicas=N",
        check=_durability,
        expected="memory, disk, replicas=N or disk+replicas=N",
    )
    store_timeout_seconds: float = setting(
        "TANDEM_STORE_TIMEOUT_SECONDS",
        2.0,
        help="how long one answer of the store may take",
        parse=float,
        check=lambda value: value > 0,
        expected="more than 0",
    )
    running_ttl_seconds: int = setting(
        "TANDEM_RUNNING_TTL_SECONDS",
        900,
        help="expiry of a running request's state, refreshed by each commit",
        parse=int,
        check=lambda value: value >= 1,
        expected="at least 1",
    )
    finished_ttl_seconds: int = setting(
        "TANDEM_FINISHED_TTL_SECONDS",
        300,
        help="how long a finished request's state is kept",
        parse=int,
        check=lambda value: value >= 1,
        expected="at least 1",
    )
    resume_seconds: float = setting(
        "TANDEM_RESUME_SECONDS",
        60.0,
        help="how long a request that was named by its caller can be resumed after its connection broke",
        parse=float,
        check=lambda value: 0 <= value <= 86400,
        expected="0 to 86400",
    )
    drain_seconds: float = setting(
        "TANDEM_DRAIN_SECONDS",
        20.0,
        help="how long running requests may go on after SIGTERM",
        parse=float,
        check=lambda value: value >= 0,
        expected="at least 0",
    )
    log_level: str = setting(
        "TANDEM_LOG_LEVEL",
        "INFO",
        help="DEBUG, INFO, WARNING or ERROR",
        parse=str.upper,
        check=lambda value: value in ("DEBUG", "INFO", "WARNING", "ERROR"),
    )
    log_format: str = setting(
        "TANDEM_LOG_FORMAT", "text", help="text or json", check=lambda value: value in ("text", "json")
    )

    def server_files(self) -> ServerFiles:
        """What to serve callers with."""
        return ServerFiles(self.tls_certificate, self.tls_key, self.tls_client_ca)

    def worker_files(self) -> ClientFiles:
        """What to reach drafts and targets with."""
        return ClientFiles(self.tls_worker_ca, self.tls_worker_certificate, self.tls_worker_key)

    def redis_files(self) -> ClientFiles:
        """What to reach the store with."""
        return ClientFiles(self.tls_redis_ca, self.tls_redis_certificate, self.tls_redis_key)
