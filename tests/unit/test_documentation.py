"""The README's configuration tables are what the services really read, with the defaults they really have."""

from __future__ import annotations

import dataclasses
import re

import pytest

from draft_service.config import DraftConfig
from orchestrator.config import OrchestratorConfig
from tandem.config import settings_of
from target_service.config import TargetConfig
from tests.support.services import REPOSITORY

TITLES = {OrchestratorConfig: "Orchestrator", DraftConfig: "Draft service", TargetConfig: "Target service"}
SHARED = "Both workers"


def tables() -> dict[str, dict[str, str]]:
    """Title to variable to default, as it stands in the README."""
    found: dict[str, dict[str, str]] = {}
    title = ""
    for line in (REPOSITORY / "README.md").read_text().splitlines():
        if heading := re.match(r"\*\*(Orchestrator|Draft service|Target service|Both workers)", line):
            title = heading[1]
        elif line.startswith("| `TANDEM_"):
            _, variable, default, _ = line.split("|", 3)
            found.setdefault(title, {})[variable.strip(" `")] = default.strip(" `")
    return found


def written(default: object) -> str:
    if default is dataclasses.MISSING:
        return "required"
    if isinstance(default, tuple):
        return ",".join(default)
    return str(default).lower() if isinstance(default, bool) else str(default)


@pytest.mark.parametrize("config", TITLES)
def test_every_setting_is_in_the_readme_with_its_default(config: type) -> None:
    shown = {**tables()[SHARED], **tables()[TITLES[config]]}
    fields = {field.name: field for field in dataclasses.fields(config)}
    declared = {each.variable: written(fields[name].default) for name, each in settings_of(config).items()}
    assert declared == {variable: shown.get(variable, "not there") for variable in declared}


def test_the_readme_names_no_setting_that_is_gone() -> None:
    known = {config: {each.variable for each in settings_of(config).values()} for config in TITLES}
    for config, title in TITLES.items():
        assert not set(tables()[title]) - known[config]
    assert set(tables()[SHARED]) <= known[DraftConfig] & known[TargetConfig]
