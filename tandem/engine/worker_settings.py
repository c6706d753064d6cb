"""Settings that draft and target have both: which model, how to run it, and how much it may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tandem.config import choice, flag, seconds, setting, whole_number
from tandem.service_settings import ServiceSettings

if TYPE_CHECKING:
    from tandem.engine.compiled_steps import CompileOptions
    from tandem.engine.loading import ModelOptions

DTYPES = ("auto", "float32", "bfloat16", "float16")
OFF = "off"
WAYS = (OFF, "inductor", "graphs", "inductor+graphs")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(ServiceSettings):
    """A worker's, by its role."""

    verifies: ClassVar[bool] = False
    """Whether logits of all tokens of a step are wanted, or those of the last one."""

    listen: str
    """Declared by each service, with its own port."""
    model: str = setting("TANDEM_{role}_MODEL", help="name on the hub, or folder, of the model", check=bool)
    revision: str = setting("TANDEM_{role}_REVISION", "main", help="branch, tag or commit of the model on the hub")
    device: str = setting("TANDEM_{role}_DEVICE", "auto", help="cpu, cuda, cuda:1, ...; auto: cuda if there, else cpu")
    dtype: str = choice(
        "TANDEM_{role}_DTYPE", "auto", DTYPES, help="dtype of the weights; auto: float32 on a CPU, else bfloat16"
    )
    gguf_file: str = setting(
        "TANDEM_{role}_GGUF_FILE", "", help="GGUF file in the model's folder, instead of safetensors"
    )
    trust_remote_code: bool = flag("TANDEM_{role}_TRUST_REMOTE_CODE", False, help="run code that comes with the model")
    threads: int = whole_number(
        "TANDEM_{role}_THREADS", 0, least=0, most=1024, help="CPU threads of the model; 0: torch's default"
    )
    slots: int = whole_number(
        "TANDEM_{role}_SLOTS", 32, least=1, most=4096, help="requests whose KV cache is held at once"
    )
    slots_per_orchestrator: int = whole_number(
        "TANDEM_{role}_SLOTS_PER_ORCHESTRATOR",
        0,
        least=0,
        most=4096,
        help="most of these that the requests of one orchestrator hold; 0: all, as long as no other one wants any",
    )
    context_length: int = whole_number(
        "TANDEM_{role}_CONTEXT_LENGTH",
        0,
        least=0,
        help="most tokens of a request; 0: the model's own, as far as the KV memory allows",
    )
    kv_memory_mib: int = whole_number(
        "TANDEM_{role}_KV_MEMORY_MIB",
        0,
        least=0,
        help="memory for the KV cache, in MiB, where the context length is not set; 0: 2048, or most of what is free on a GPU",
    )
    prefill_chunk: int = whole_number(
        "TANDEM_{role}_PREFILL_CHUNK", 256, least=32, most=65536, help="most tokens of prefill in one step"
    )
    prefix_reuse: bool = flag(
        "TANDEM_{role}_PREFIX_REUSE",
        True,
        help="take over what the cache holds of a prompt's beginning, from any request of the same salt",
    )
    max_speculative_tokens: int = whole_number(
        "TANDEM_MAX_SPECULATIVE_TOKENS",
        16,
        least=1,
        most=64,
        help="longest block of draft tokens, look-ahead not counted",
    )
    compile: str = choice(
        "TANDEM_{role}_COMPILE",
        OFF,
        WAYS,
        help="prepare decode and verify steps before serving, in padded shapes: inductor (torch.compile), graphs (CUDA "
        "graphs), or inductor+graphs",
    )
    drain_seconds: float = seconds(
        "TANDEM_DRAIN_SECONDS", 10.0, most=3600, help="on SIGTERM, seconds for running requests to end"
    )
    debug_invariants: bool = flag("TANDEM_DEBUG_INVARIANTS", False, help="also check invariants that cost time")

    def model_options(self) -> ModelOptions:
        """The part that says which model to load, and how."""
        from tandem.engine.loading import ModelOptions

        return ModelOptions(
            model=self.model,
            revision=self.revision,
            device=self.device,
            dtype=self.dtype,
            gguf_file=self.gguf_file,
            trust_remote_code=self.trust_remote_code,
            threads=self.threads,
            slots=self.slots,
            context_length=self.context_length,
            kv_memory_bytes=self.kv_memory_mib << 20,
            compiled=self._compile_options(),
            verifies=self.verifies,
        )

    def _compile_options(self) -> CompileOptions | None:
        if self.compile == OFF:
            return None
        from tandem.engine.compiled_steps import CompileOptions

        longest = self.max_speculative_tokens + 1
        return CompileOptions(
            way=self.compile,
            variable=f"TANDEM_{self.role.upper()}_COMPILE",
            longest_feed=longest,
            longest_rows=longest if self.verifies else 1,
        )
