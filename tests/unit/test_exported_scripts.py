"""No script that could be exported imports what it does not use, or names what it does not have."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from harness.export.files import FILES
from harness.export.recorded_run import RecordedRun
from harness.export.script import file_text, refusals
from harness.layout.layout import resolve_layout
from harness.util.text import UserError
from tests.support.commands import compose_config

STRATEGIES = [path.stem for path in sorted((Path(__file__).parents[2] / "conf" / "strategy").glob("*.yaml"))]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_script_has_the_names_that_it_uses(world_size: int, tmp_path: Path) -> None:
    settings = ("precision=bf16_mixed", "checkpointing=full", "train.global_batch=16", "train.micro_batch=1")
    for strategy in STRATEGIES:
        with suppress(UserError):  # not a layout of so many ranks
            config = compose_config(f"strategy={strategy}", f"world_size={world_size}", *settings)
            layout = resolve_layout(config.strategy, world_size)
            run = RecordedRun(Path("/results/run"), Path("/other"), config, layout, "cpu", 1)
            for name in (name for name in FILES if name.endswith(".py") and not refusals(run, FILES[name])):
                (tmp_path / f"{strategy}_{name}").write_text(file_text(run, name))
    assert len(list(tmp_path.iterdir())) > 20
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout
