"""`python -m bench acceptance`: what the demo pair accepts of a fixed set of prompts, beside what it did when it was recorded.

Right text can hide broken caches, since whatever the draft proposes, the output stays right: only the acceptance falls.
Seeds are fixed, so on one machine the same code gives the same numbers, and elsewhere nearly so.

How far it falls is up to the pair: a draft that knows little of the target loses little with its cache. So a smaller pair
whose draft knows more is measured beside it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .prompts import PROMPT_CLASSES, PromptClass
from .running_pair import ModelPair, RunningPair, Way, running_pair
from .services import REPOSITORY, NotMeasured

RECORDED = Path(__file__).with_name("acceptance.json")
MODELS = REPOSITORY / "models"
GAMMA = 4
TOKENS = 48
TEMPERATURES = (0.0, 1.0)
LARGEST_FALL = 0.05
SHARPER = ModelPair(target=MODELS / "tiny-target", draft=MODELS / "tiny-draft")
"""It loses six points and more with a cache that is wrong after each rejection, where the demo pair loses one."""


@dataclass(frozen=True, slots=True)
class AcceptanceRow:
    """Prompts of one class at one temperature."""

    name: str
    accepted: float
    """Draft tokens that became output, of those drafted."""
    expected: float
    """Sum of min(p, q) over the positions reached, of those drafted."""
    recorded: float | None
    """`accepted` when it was recorded."""

    @property
    def fell(self) -> bool:
        """By more than five points, or from nobody knows what."""
        return self.recorded is None or self.accepted < self.recorded - LARGEST_FALL


def recorded(file: Path = RECORDED) -> dict[str, float]:
    """The numbers of a record, by default the committed ones; none where there is no record."""
    numbers: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    return numbers


def record(rows: list[AcceptanceRow], file: Path = RECORDED) -> None:
    """Writes them anew."""
    file.write_text(json.dumps({row.name: round(row.accepted, 4) for row in rows}, indent=2) + "\n")


async def measure(before: Mapping[str, float], models: ModelPair) -> list[AcceptanceRow]:
    """All classes at all temperatures, and all of them together; then the same for the sharper pair."""
    rows: list[AcceptanceRow] = []
    pairs = {"tiny: ": SHARPER} if models == SHARPER else {"": models, "tiny: ": SHARPER}
    for prefix, each in pairs.items():
        rows += [
            AcceptanceRow(f"{prefix}{name}", accepted / drafted, expected / drafted, before.get(f"{prefix}{name}"))
            for name, (drafted, accepted, expected) in (await _counts(each)).items()
        ]
    return rows


async def _counts(models: ModelPair) -> dict[str, tuple[int, int, float]]:
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        async with running_pair(models, Path(folder)) as services:
            counts = {
                f"{each.name} T={temperature:g}": await _count(services, each, temperature)
                for each in PROMPT_CLASSES
                for temperature in TEMPERATURES
            }
    drafted, accepted, expected = zip(*counts.values(), strict=True)
    counts["all"] = sum(drafted), sum(accepted), sum(expected)
    return counts


async def _count(services: RunningPair, prompts: PromptClass, temperature: float) -> tuple[int, int, float]:
    """Draft tokens, those accepted, and how many that was to be."""
    drafted, accepted, expected = 0, 0, 0.0
    for index in range(len(prompts.messages)):
        request = prompts.request(index)
        request.temperature, request.seed = temperature, 1000 + index
        request.max_tokens, request.ignore_eos = TOKENS, True
        speculation = (await services.decode(request, Way(GAMMA, ahead=False))).finish.speculation
        if speculation.degraded_rounds:
            raise NotMeasured(f"rounds without the draft: {list(speculation.degraded_reasons)}")
        drafted += speculation.draft_tokens
        accepted += speculation.accepted_tokens
        expected += speculation.expected_accepted_tokens
    return drafted, accepted, expected
