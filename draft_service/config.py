"""Settings of the draft service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem import telemetry
from tandem.config import is_address, parse_bool, setting

if TYPE_CHECKING:
    from tandem.engine.loading import ModelOptions

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Proposes blocks of draft tokens."""

    listen: str = setting(
        "TANDEM_DRAFT_LISTEN", "127.0.0.1:50052", help="host:port to listen on; port 0 takes a free one"
    )
    tls_certificate: str = setting(
        "TANDEM_TLS_CERTIFICATE", "", help="PEM file of the certificate to serve with; empty: plain text"
    )
    tls_key: str = setting("TANDEM_TLS_KEY", "", help="PEM file of its key")
    tls_client_ca: str = setting(
        "TANDEM_TLS_CLIENT_CA", "", help="PEM file of the CA whose clients may connect; empty: any may"
    )
    metrics_listen: str = setting(
        "TANDEM_DRAFT_METRICS_LISTEN",
        "",
        help="host:port for Prometheus; empty: no metrics endpoint",
        check=lambda value: not value or is_address(value),
        expected="host:port",
    )
    health_listen: str = setting(
        "TANDEM_DRAFT_HEALTH_LISTEN",
        "",
        help="host:port where health alone is served, in plain text, for probes that speak no TLS; empty: not",
        check=lambda value: not value or is_address(value),
        expected="host:port",
    )
    method: str = setting(
        "TANDEM_DRAFT_METHOD",
        "model",
        help="model, or ngram: what followed the last tokens when they stood in the request before; that needs the "
        "tokenizer of TANDEM_DRAFT_MODEL, and no weights",
        check=("model", "ngram").__contains__,
        expected="model or ngram",
    )
    layers: int = setting(
        "TANDEM_DRAFT_LAYERS",
        0,
        help="run only so many of the model's first layers, with its own head: the target itself can draft so; 0: all",
        parse=int,
        check=lambda value: 0 <= value <= 1024,
        expected="0 to 1024",
    )
    model: str = setting("TANDEM_DRAFT_MODEL", help="name on the hub, or folder, of the draft model", check=bool)
    revision: str = setting("TANDEM_DRAFT_REVISION", "main", help="branch, tag or commit of the model on the hub")
    device: str = setting("TANDEM_DRAFT_DEVICE", "auto", help="cpu, cuda, cuda:1, ...; auto: cuda if there, else cpu")
    dtype: str = setting(
        "TANDEM_DRAFT_DTYPE",
        "auto",
        help="dtype of the weights; auto: float32 on a CPU, else bfloat16",
        check=DTYPES.__contains__,
        expected="one of " + ", ".join(DTYPES),
    )
    gguf_file: str = setting(
        "TANDEM_DRAFT_GGUF_FILE", "", help="GGUF file in the model's folder, instead of safetensors"
    )
    trust_remote_code: bool = setting(
        "TANDEM_DRAFT_TRUST_REMOTE_CODE",
        False,
        help="run code that comes with the model",
        parse=parse_bool,
        expected="true or false",
    )
    threads: int = setting(
        "TANDEM_DRAFT_THREADS",
        0,
        help="CPU threads of the model; 0: torch's default",
        parse=int,
        check=lambda value: 0 <= value <= 1024,
        expected="0 to 1024",
    )
    slots: int = setting(
        "TANDEM_DRAFT_SLOTS",
        32,
        help="requests whose KV cache is held at once",
        parse=int,
        check=lambda value: 1 <= value <= 4096,
        expected="1 to 4096",
    )
    context_length: int = setting(
        "TANDEM_DRAFT_CONTEXT_LENGTH",
        0,
        help="most tokens of a request; 0: the model's own, as far as the KV memory allows",
        parse=int,
        check=lambda value: value >= 0,
        expected="a number of tokens",
    )
    kv_memory_mib: int = setting(
        "TANDEM_DRAFT_KV_MEMORY_MIB",
        0,
        help="memory for the KV cache, in MiB, where the context length is not set; 0: 2048, or most of what is free on a GPU",
        parse=int,
        check=lambda value: value >= 0,
        expected="a number of MiB",
    )
    prefill_chunk: int = setting(
        "TANDEM_DRAFT_PREFILL_CHUNK",
        256,
        help="most tokens of prefill in one step",
        parse=int,
        check=lambda value: 32 <= value <= 65536,
        expected="32 to 65536",
    )
    prefix_reuse: bool = setting(
        "TANDEM_DRAFT_PREFIX_REUSE",
        True,
        help="take over what the cache holds of a prompt's beginning, from any request of the same salt",
        parse=parse_bool,
        expected="true or false",
    )
    support_size: int = setting(
        "TANDEM_DRAFT_SUPPORT_SIZE",
        64,
        help="most tokens that a draft distribution is cut to",
        parse=int,
        check=lambda value: 1 <= value <= 1024,
        expected="1 to 1024",
    )
    max_speculative_tokens: int = setting(
        "TANDEM_MAX_SPECULATIVE_TOKENS",
        16,
        help="longest block of draft tokens, look-ahead not counted",
        parse=int,
        check=lambda value: 1 <= value <= 64,
        expected="1 to 64",
    )
    ahead_rows: int = setting(
        "TANDEM_DRAFT_AHEAD_ROWS",
        0,
        help="likely outcomes of a verification that are drafted for at a time while it runs; 0: none",
        parse=int,
        check=lambda value: 0 <= value <= 256,
        expected="0 to 256",
    )
    drain_seconds: float = setting(
        "TANDEM_DRAIN_SECONDS",
        10.0,
        help="on SIGTERM, seconds for running requests to end",
        parse=float,
        check=lambda value: 0 <= value <= 3600,
        expected="0 to 3600",
    )
    log_level: str = setting(
        "TANDEM_LOG_LEVEL",
        "INFO",
        help="least level that is logged",
        parse=str.upper,
        check=telemetry.LEVELS.__contains__,
        expected="one of " + ", ".join(telemetry.LEVELS),
    )
    log_format: str = setting(
        "TANDEM_LOG_FORMAT",
        "text",
        help="text, or json for one object a line",
        check=telemetry.FORMATS.__contains__,
        expected="text or json",
    )
    debug_invariants: bool = setting(
        "TANDEM_DEBUG_INVARIANTS",
        False,
        help="also check invariants that cost time",
        parse=parse_bool,
        expected="true or false",
    )

    def model_options(self) -> ModelOptions:
        """The part that says which model to load, and how."""
        from tandem.engine.loading import ModelOptions

        return ModelOptions(
            model=self.model,
            revision=self.revision,
            device=self.device,
            dtype=self.dtype,
            gguf_file=self.gguf_file,
            layers=self.layers,
            trust_remote_code=self.trust_remote_code,
            threads=self.threads,
            slots=self.slots,
            extra_slots=self.ahead_rows,
            context_length=self.context_length,
            kv_memory_bytes=self.kv_memory_mib << 20,
        )
