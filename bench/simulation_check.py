"""The simulation beside what was measured: the same constants, the same loads, and how far they are apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from .acceptance_by_position import conditional
from .simulation import IN_STEP, IN_TURNS, Constants, Curve, Layout, simulate
from .statistic import median
from .tables import results_table


@dataclass(frozen=True, slots=True)
class CheckedCase:
    """One measured case. Tokens a second of all its requests, prompts' reading left out."""

    source: str
    requests: int
    gamma: int
    measured: float
    in_step: float
    """Simulated, if the requests share their forwards."""
    in_turns: float
    """Simulated, if they come in groups."""

    @property
    def error(self) -> float:
        """Of the nearer of the two, as a share of what was measured; requests drift from the one to the other."""
        return min((simulated / self.measured - 1.0 for simulated in (self.in_step, self.in_turns)), key=abs)


def constants_from(results: Mapping[str, Any]) -> Constants:
    """Those that `serving` wrote; raises ValueError where there are none."""
    found = results.get("serving", {}).get("constants")
    if not found:
        raise ValueError(
            "no constants: they are written by `python -m bench serving --requests 1,... --gamma 0,... --json FILE`"
        )
    return Constants(
        draft_step=_curve(found["draft_step"]),
        target_forward=_curve(found["target_forward"]),
        overhead=found["overhead"],
        orchestrator=found["orchestrator"],
        acceptance=tuple(found["acceptance"]),
    )


def _curve(found: Mapping[str, Any]) -> Curve:
    return Curve(tuple((float(size), float(seconds)) for size, seconds in found["points"]))


def check(results: Mapping[str, Any]) -> list[CheckedCase]:
    """Every case of `serving` but the one that the overhead was taken from, and every row of `pair`."""
    rows = results.get("pair", {}).get("rows", ())
    cases = [_pair_case(row) for row in rows if row["speedup"] is not None]  # null: it ended before a full round
    serving = results.get("serving")
    if serving:
        constants = constants_from(results)
        loads = [case for case in serving["cases"] if (case["concurrency"], case["gamma"]) != (1, 0)]
        cases += [_serving_case(case, constants) for case in loads]
    return cases


def _serving_case(case: Mapping[str, Any], constants: Constants) -> CheckedCase:
    own = dataclasses.replace(constants, acceptance=tuple(case["acceptance"]))
    return _checked("serving", case["concurrency"], case["gamma"], case["decode_tokens_per_second"], own)


def _pair_case(row: Mapping[str, Any]) -> CheckedCase:
    gamma, costs = row["gamma"], row["costs"]
    own = Constants(
        draft_step=Curve(((1.0, costs["draft"] / gamma / 1000),)),
        target_forward=Curve(((gamma + 1.0, costs["verify"] / 1000),)),
        overhead=costs["overhead"] / 1000,
        acceptance=conditional(row["acceptance_per_position"]),
    )
    return _checked(f"{row['prompts']} T={row['temperature']:g}", 1, gamma, row["tokens_per_second"], own)


def _checked(source: str, requests: int, gamma: int, measured: float, constants: Constants) -> CheckedCase:
    rates = [
        simulate(constants, Layout(), requests=requests, gamma=gamma, spread=spread).tokens_per_second
        for spread in (IN_STEP, IN_TURNS)
    ]
    return CheckedCase(source, requests, gamma, measured, *rates)


def check_table(cases: list[CheckedCase]) -> Table:
    """Each case, and the median of the errors."""
    table = results_table(
        "Simulated beside measured", ("case", "requests", "gamma", "measured tok/s", "in step", "in turns", "error")
    )
    for case in cases:
        table.add_row(
            case.source,
            str(case.requests),
            str(case.gamma),
            f"{case.measured:.1f}",
            f"{case.in_step:.1f}",
            f"{case.in_turns:.1f}",
            f"{case.error:+.0%}",
        )
    errors = [abs(case.error) for case in cases]
    table.caption = (
        f"error: of the nearer one. Median of the absolute errors {median(errors):.0%}, largest {max(errors):.0%}."
    )
    return table
