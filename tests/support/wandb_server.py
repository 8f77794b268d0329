"""A stand-in for W&B's server with enough of its HTTP to take runs and a table; it can be told to misbehave."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# The queries besides those on the run itself, with the answers of an empty server that keeps no artifacts.
ANSWERS: dict[str, Any] = {
    "Viewer": {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}},
    "ServerFeaturesQuery": {"serverInfo": {"features": []}},
    "ArtifactType": {"project": None},
    "CreateArtifact": {"createArtifact": {"artifact": {"id": "a", "state": "COMMITTED", "artifactSequence": None}}},
}

HANG_SECONDS = 240.0  # after which a server that hangs gives up


@dataclass
class Run:
    """A run as the server stores it."""

    settings: dict[str, Any] = field(default_factory=dict)  # project, group, name, tags, job type
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    complete: bool = False


class Server(ThreadingHTTPServer):
    """A server that misbehaves on request.

    `misbehaves` is the part (graphql, file_stream), if any, and how: an HTTP status, or 0 to hang.
    """

    daemon_threads = True
    misbehaves: tuple[str, int] = ("", 0)

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: dict[str, Run] = {}
        self.bytes_received = b""
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fail(self, part: str, status: int | None) -> None:
        """Misbehave in this part from now on, or die if there is no status."""
        if status is None:
            self.die()
        else:
            self.misbehaves = (part, status)

    def die(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that hangs up."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_PUT(self) -> None:
        _, _, run, name = self.path.split("/", 3)
        self.server.runs[run].files[name] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        body, (*_, run_id, part) = json.loads(self.body()), self.path.split("/")
        misbehaves, status = self.server.misbehaves
        if part != misbehaves:
            self.answer({"data": self.graphql(body)} if part == "graphql" else self.stream(run_id, body))
        elif status:
            self.answer({"errors": [{"message": "not today"}]}, status)
        else:
            self.server.over.wait(HANG_SECONDS)
            self.close_connection = True

    def graphql(self, query: dict[str, Any]) -> Any:
        (operation,) = re.findall(r"^\s*(?:query|mutation)\s+(\w+)", query["query"])
        variables = query.get("variables") or {}
        if operation == "UpsertBucket":
            run = self.server.runs.setdefault(variables["name"], Run())
            run.settings |= {key: value for key, value in variables.items() if value is not None}
            run.config |= {key: entry["value"] for key, entry in json.loads(variables.get("config") or "{}").items()}
            project = {"id": "p", "name": run.settings["project"], "entity": {"id": "e", "name": "me"}}
            own = {"id": variables["name"], "name": variables["name"], "displayName": variables["displayName"]}
            return {"upsertBucket": {"bucket": own | {"config": "{}", "project": project}, "inserted": True}}
        if operation == "CreateRunFiles":
            files = [
                {"name": n, "uploadUrl": f"{self.server.url}/put/{variables['run']}/{n}"} for n in variables["files"]
            ]
            return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
        return ANSWERS[operation]

    def stream(self, run_id: str, update: dict[str, Any]) -> Any:
        run = self.server.runs[run_id]
        files = {name: map(json.loads, file.get("content", [])) for name, file in (update.get("files") or {}).items()}
        run.history += files.get("wandb-history.jsonl", [])
        run.summary = [run.summary, *files.get("wandb-summary.json", [])][-1]
        run.complete |= bool(update.get("complete"))
        return {"exitcode": None, "limits": {}}

    def body(self) -> bytes:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bytes_received += body
        return body

    def answer(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.over.set()
        server.die()
