"""The README's configuration table is what the services really read."""

from __future__ import annotations

import pytest

from draft_service.config import DraftConfig
from orchestrator.config import OrchestratorConfig
from tandem.config import settings_of
from target_service.config import TargetConfig
from tests.support.services import REPOSITORY


@pytest.mark.parametrize("config", [OrchestratorConfig, DraftConfig, TargetConfig])
def test_every_setting_is_in_the_readme(config: type) -> None:
    rows = (REPOSITORY / "README.md").read_text().splitlines()
    table = {row.split("`")[1] for row in rows if row.startswith("| `TANDEM_")}
    missing = {declared.variable for declared in settings_of(config).values()} - table
    assert not missing


def test_the_readme_names_no_setting_that_is_gone() -> None:
    known = {
        declared.variable
        for config in (OrchestratorConfig, DraftConfig, TargetConfig)
        for declared in settings_of(config).values()
    }
    rows = (REPOSITORY / "README.md").read_text().splitlines()
    table = {row.split("`")[1] for row in rows if row.startswith("| `TANDEM_")}
    assert not table - known
