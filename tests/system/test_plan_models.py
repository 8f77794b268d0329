"""harness plan of Hugging Face models without formulas: they are traced once, in a process of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli.main import main

QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 352,
    "max_position_embeddings": 64,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}

# Queries, keys and values have biases.
LAYER = 2 * 128 * 128 + 2 * 128 * 32 + 128 + 2 * 32 + 3 * 128 * 352 + 2 * 128

PARAMETERS = 2 * 1000 * 128 + 128 + 3 * LAYER


def settings(folder: Path, strategy: str = "zero3") -> list[str]:
    """Return the arguments of a plan of the model in a folder."""
    cache = f"data.cache={folder / 'cache'}"
    return ["model=hf", f"model.path={folder}", f"strategy={strategy}", "cluster=8xh100", "precision=bf16_mixed", cache]


def test_a_model_is_traced_once_and_without_torch_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    command = "import sys; from harness.cli.main import main; status = main(sys.argv[1:]); "
    command += "assert 'torch' not in sys.modules and 'pandas' not in sys.modules; sys.exit(status)"
    words = [sys.executable, "-c", command, "plan", "format=json", *settings(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "once, in a process of its own" in ended.stderr
    (row,) = json.loads(ended.stdout)
    assert (row["parameters"], row["model"]) == (PARAMETERS, tmp_path.name)
    assert row["parameter_bytes"] == pytest.approx(2 * PARAMETERS / 8, rel=0.02)
    assert row["optimizer_bytes"] == pytest.approx(12 * PARAMETERS / 8, rel=0.02)
    assert row["predicted_peak_bytes"] > 2 * row["activation_bytes"] > 0

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started again")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert main(["plan", "format=json", *settings(tmp_path)]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out) == [row] and "Tracing" not in output.err
    assert main(["plan", *settings(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "its activations from a traced layer" in text
    assert "measured peaks of the least predictable stack on file were 0.84 to 1.45" in text


def test_a_model_that_is_no_causal_language_model_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "d_model": 64}))
    assert main(["plan", *settings(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "is not a causal language model" in lines[1] and lines[0].startswith("Tracing")
