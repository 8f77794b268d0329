"""harness plan of published models' configurations, whose parameters were counted by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.layout.model_profile import parameter_count
from harness.planner.plan import plans
from tests.support.commands import ROOT

MODELS = yaml.safe_load((ROOT / "tests" / "data" / "foreign" / "models.yaml").read_text())

ALWAYS = ("llama2-7b", "gemma-2b")  # by formulas, and by a trace


def case(model: dict[str, Any]) -> Any:
    path = Path(model["address"])
    name = path.parent.name if path.name == "config.json" else path.stem
    return pytest.param(model, id=name, marks=() if name in ALWAYS else pytest.mark.long)


@pytest.mark.parametrize("model", [case(model) for model in MODELS])
def test_a_published_model_is_planned(model: dict[str, Any], tmp_path: Path) -> None:
    tables, layers, attention, mlp, norms, last = model["parts"]
    parameters = tables + layers * (attention + mlp + norms) + last
    file = tmp_path / "config.json"
    file.write_text(json.dumps(model["config"]))
    words = f"model={file} {model.get('settings', '')} strategy=zero3 cluster=8xh100 precision=bf16_mixed"
    (plan,) = plans([*words.split(), "train.seq_len=128", "plan.simulate=false", f"data.cache={tmp_path}"])
    (prediction,) = plan.predictions
    assert parameter_count(prediction.config.model) == parameters
    state = (prediction.memory.parameter_bytes, prediction.memory.optimizer_bytes)
    assert state == pytest.approx((2 * parameters / 8, 12 * parameters / 8), rel=0.02)
