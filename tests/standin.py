"""A stand-in for W&B's server: enough of its HTTP to take a run, and told how to misbehave."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    daemon_threads = True
    behaviour = "work"

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = []
        self.released = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_): ...

    def body(self):
        import gzip

        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while True:
                n = int(self.rfile.readline().strip() or b"0", 16)
                if not n:
                    self.rfile.readline()
                    break
                data += self.rfile.read(n)
                self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        return data

    def answer(self, value, code=200):
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.server.requests.append(("GET", self.path, None, dict(self.headers)))
        self.answer({})

    def do_PUT(self):
        self.server.requests.append(("PUT", self.path, self.body(), dict(self.headers)))
        self.answer({})

    def do_POST(self):
        data = self.body()
        self.server.requests.append(("POST", self.path, data, dict(self.headers)))
        b = self.server.behaviour
        if b in ("401", "500"):
            return self.answer({"errors": [{"message": "no"}]}, int(b))
        if self.path == "/graphql":
            q = json.loads(data)
            op = re.search(r"(query|mutation)\s+(\w+)", q["query"])
            print("GQL", op and op.group(2), json.dumps(q.get("variables"))[:300], flush=True)
            v = q.get("variables") or {}
            if b == "hang_init":
                self.server.released.wait(60)
                return
            if "upsertBucket" in q["query"]:
                return self.answer(
                    {
                        "data": {
                            "upsertBucket": {
                                "bucket": {
                                    "id": "b-" + str(v.get("name")),
                                    "name": v.get("name"),
                                    "displayName": v.get("displayName"),
                                    "description": "",
                                    "config": "{}",
                                    "sweepName": "",
                                    "historyLineCount": 0,
                                    "project": {
                                        "id": "p",
                                        "name": v.get("project"),
                                        "entity": {"id": "e", "name": "me"},
                                    },
                                },
                                "inserted": True,
                            }
                        }
                    }
                )
            if "viewer" in q["query"]:
                return self.answer(
                    {
                        "data": {
                            "viewer": {
                                "id": "u",
                                "entity": "me",
                                "username": "me",
                                "flags": "{}",
                                "teams": {"edges": []},
                            },
                            "serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None},
                        }
                    }
                )
            if "createRunFiles" in q["query"]:
                return self.answer(
                    {
                        "data": {
                            "createRunFiles": {
                                "runID": "b",
                                "uploadHeaders": [],
                                "files": [
                                    {"name": n, "uploadUrl": f"http://127.0.0.1:{self.server.server_port}/put/{n}"}
                                    for n in v["files"]
                                ],
                            }
                        }
                    }
                )
            if op.group(2) == "ArtifactType":
                return self.answer({"data": {"project": None}})
            if op.group(2) == "CreateArtifact":
                return self.answer(
                    {
                        "data": {
                            "createArtifact": {
                                "artifact": {
                                    "id": "a",
                                    "state": "COMMITTED",
                                    "artifactSequence": {"latestArtifact": {"id": "a"}},
                                }
                            }
                        }
                    }
                )
            print("   QUERY", q["query"][:1500])
            return self.answer({"data": {}})
        if self.path.endswith("/file_stream"):
            if b == "hang_finish":
                self.server.released.wait(60)
                return
            if b.startswith("fs"):
                return self.answer({"error": "x"}, int(b[2:]))
            print("FS", data[:300], flush=True)
            return self.answer({"exitcode": None, "limits": {}})
        print("POST", self.path, data[:200])
        self.answer({})


@contextmanager
def serving():
    s = Server()
    threading.Thread(target=s.serve_forever, daemon=True).start()
    try:
        yield s
    finally:
        s.released.set()
        s.shutdown()
        s.server_close()
