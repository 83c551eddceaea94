"""A W&B server of the size of a test: the few requests that a run makes, runs kept in memory."""

from __future__ import annotations

import base64
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = {"id": "entity", "name": "tester"}


@dataclass
class StoredRun:
    """What the server knows of a run."""

    name: str
    project: str
    display_name: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    starts: int = 0

    def rows(self) -> list[dict[str, Any]]:
        """The history, without what W&B adds to it."""
        return [{k: v for k, v in row.items() if k[0] != "_"} for row in self.history]

    def bucket(self) -> dict[str, Any]:
        return {
            "id": base64.b64encode(self.name.encode()).decode(),
            "name": self.name,
            "displayName": self.display_name,
            "summaryMetrics": json.dumps(self.summary),
            "historyLineCount": len(self.history),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "historyTail": json.dumps([json.dumps(row) for row in self.history[-1:]]),
            "eventsTail": "[]",
            "config": "{}",
            "tags": [],
            "wandbConfig": json.dumps({"t": 1}),
            "project": {"id": "project", "name": self.project, "entity": ENTITY},
        }


class FakeWandbServer:
    """``url`` to reach it; ``status`` other than 200 is its answer to every request."""

    def __init__(self) -> None:
        self.runs: dict[str, StoredRun] = {}
        self.status = 200
        handler = type("Handler", (_Handler,), {"server_state": self})
        self._server = _QuietServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL request."""
        found = re.match(r"\s*(?:query|mutation)\s+(\w+)", query)
        name = found[1] if found else ""
        if name == "UpsertBucket":
            run = self.runs.get(variables["name"])
            if inserted := run is None:
                run = self.runs[variables["name"]] = StoredRun(
                    variables["name"], variables["project"]
                )
            run.starts += 1
            run.display_name = variables.get("displayName") or run.display_name
            return {"upsertBucket": {"bucket": run.bucket(), "inserted": inserted}}
        if name == "RunResumeStatus":
            run = self.runs.get(variables["name"])
            model = {"id": "project", "name": variables["project"], "entity": ENTITY}
            return {"model": {**model, "bucket": run.bucket() if run else None}}
        if name == "CreateRunFiles":
            files = [{"name": n, "uploadUrl": f"{self.url}/upload"} for n in variables["files"]]
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
        viewer = {"id": "viewer", "entity": ENTITY["name"], "username": "tester", "flags": "{}"}
        viewer |= {"teams": {"edges": []}}
        return {"viewer": viewer, "serverInfo": None, "_": None}

    def stream(self, run: StoredRun, files: dict[str, Any]) -> None:
        """Lines of history, and the summary, as they come from a run."""
        for name, part in files.items():
            if name == "wandb-history.jsonl":
                del run.history[part["offset"] :]
                run.history += [json.loads(line) for line in part["content"]]
            elif name == "wandb-summary.json":
                run.summary |= json.loads(part["content"][-1])


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args: object) -> None:
        """A client that was killed is no news."""


class _Handler(BaseHTTPRequestHandler):
    server_state: FakeWandbServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        state = self.server_state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        if state.status != 200:
            self._reply(state.status, {"error": "refused", "errors": [{"message": "refused"}]})
        elif self.path.endswith("/graphql"):
            self._reply(200, {"data": state.answer(body["query"], body.get("variables") or {})})
        elif stream := re.search(r"/([^/]+)/file_stream$", self.path):
            state.stream(state.runs[stream[1]], body.get("files") or {})
            self._reply(200, {"exitcode": None, "limits": {}})
        else:
            self._reply(404, {"error": self.path})

    def do_PUT(self) -> None:  # config.yaml, requirements.txt, ...
        self.rfile.read(int(self.headers["Content-Length"]))
        self._reply(200, {})

    def do_GET(self) -> None:
        self._reply(404, {"error": self.path})

    def _reply(self, status: int, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        pass
