"""Models by a file, a folder or a name in a Hugging Face hub, of which a server here plays the part."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from harness.config.model_files import names_model
from tests.support.commands import read_rows
from tests.support.processes import run_python

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "layer_types": ["full_attention"] * 4,
}

COMMIT = "0123456789abcdef0123456789abcdef01234567"

PLAN = ("-m", "harness", "plan", "cluster=8xh100", "strategy=ddp", "train.seq_len=64")


class Hub(BaseHTTPRequestHandler):
    """The addresses of a hub that the library asks for one file of one model; another is gated, all others unknown."""

    asked: list[str]

    def do_HEAD(self) -> None:
        type(self).asked.append(self.path)
        if self.path == "/Some/Qwen3/resolve/main/config.json":
            self.answer(200, {"ETag": '"1"', "X-Repo-Commit": COMMIT})
        elif self.path.startswith("/Some/Gated/"):
            self.answer(403, {"X-Error-Code": "GatedRepo"})
        else:
            self.answer(404, {"X-Error-Code": "RepoNotFound"})

    do_GET = do_HEAD  # noqa: N815

    def answer(self, status: int, headers: dict[str, str]) -> None:
        content = json.dumps(QWEN3).encode() if status == 200 else b""
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_model_of_a_hub_is_planned_and_nothing_but_its_configuration_fetched(hub: str, tmp_path: Path) -> None:
    places = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home")}
    done = run_python(tmp_path, *PLAN, "model=Some/Qwen3", **places)
    assert done.returncode == 0 and "trains 1 billion tokens" in done.stdout, done.stderr
    assert f"Fetching config.json of Some/Qwen3 from {hub}" in done.stderr
    assert {path for path in Hub.asked if not path.startswith("/api/")} == {"/Some/Qwen3/resolve/main/config.json"}
    Hub.asked = []
    again = run_python(tmp_path, *PLAN, "model=Some/Qwen3", HF_HUB_OFFLINE="1", **places)
    assert again.stdout == done.stdout and "Fetching" not in again.stderr and Hub.asked == []


@pytest.mark.parametrize(
    ("model", "variables", "reason"),
    [
        ("Some/Gated", {}, "is gated: ask for access on its page, then log in with hf auth login"),
        ("Some/Other", {}, "is no model at http://127.0.0.1:"),
        ("Some/Other", {"HF_HUB_OFFLINE": "1"}, "has no config.json in the hub's cache, and none can be fetched ("),
        ("a/b/c", {}, "is no config.json, no folder with one and no name in the hub: name a config.json"),
        ("./folder", {}, "is no config.json and no folder with one: name a config.json, a folder that has one,"),
        ("missing.json", {}, "is no config.json and no folder with one: name"),
    ],
)
def test_what_is_no_model_is_said_in_one_line(
    hub: str, tmp_path: Path, model: str, variables: dict[str, str], reason: str
) -> None:
    (tmp_path / "folder").mkdir()
    places = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home")} | variables
    done = run_python(tmp_path, *PLAN, f"model={model}", **places)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and line.startswith(f"model.path={model} {reason}"), done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


@pytest.mark.parametrize("model", ["folder", "folder/config.json", "folder/"])
def test_a_file_or_a_folder_is_a_model_beside_presets(tmp_path: Path, model: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3))
    name = model if "/" in model else f"./{model}"
    done = run_python(tmp_path, "-m", "harness", "plan", "-m", "format=json", f"model={name},7b", *PLAN[3:])
    assert [row["model"] for row in json.loads(done.stdout)] == ["folder", "7b"], done.stderr


def test_names_of_presets_are_no_files() -> None:
    assert not any(map(names_model, ("model=7b", "model=gpt_1.3b", "strategy=a/b")))
    assert all(map(names_model, ("model=a/b", "model=x.json", "model=/a")))


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp_full_shard"])
def test_a_model_with_a_list_of_layers_trains(tmp_path: Path, strategy: str) -> None:
    """Its reference is trained with fewer layers, and the list is cut with them."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    command = ("-m", "harness", f"model={tmp_path}/", f"strategy={strategy}", "world_size=2", "train.seq_len=32")
    done = run_python(tmp_path, *command, "tracking=none", "results_dir=results")
    (row,) = read_rows(tmp_path / "results", "runs").to_dict("records")
    assert row["status"] == "ok" and row["proven_steps"] == 16, done.stdout + done.stderr
