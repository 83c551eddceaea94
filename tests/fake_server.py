"""A small OpenAI-compatible HTTP server whose replies are scripted, bad ones included."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Script = Callable[["Handler", dict], None]


class FakeServer(ThreadingHTTPServer):
    """Chat completions that echo the question in capitals; "Why?" is cut off at the length limit.

    `script` holds what to do with the next requests instead, first come first served.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.script: list[Script] = []
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.times: list[float] = []
        self.models: object = {"data": [{"id": "tiny"}]}
        self.lock = threading.Lock()
        self.in_flight = self.most_in_flight = 0

    def __enter__(self) -> "FakeServer":
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Dies: no new connections."""
        self.shutdown()
        self.thread.join(timeout=10)
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.reply(200, self.server.models)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append({"path": self.path, **request})
            self.server.headers.append(dict(self.headers))
            self.server.times.append(time.monotonic())
            self.server.in_flight += 1
            self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
            act = self.server.script.pop(0) if self.server.script else answer()
        try:
            act(self, request)
        finally:
            with self.server.lock:
                self.server.in_flight -= 1

    def reply(self, code: int, body: object, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def completion(text: object, reason: object = "stop", **message: object) -> dict:
    reply = {"role": "assistant", "content": text, **message}
    choice = {"message": reply, "finish_reason": reason}
    return {"choices": [choice], "usage": {"completion_tokens": 4}}


def answer(after_s: float = 0.0) -> Script:
    def act(handler: Handler, request: dict) -> None:
        time.sleep(after_s)
        text = request["messages"][-1]["content"]
        handler.reply(200, completion(text.upper(), "length" if text == "Why?" else "stop"))

    return act


def fail(code: int, body: object = b"", **headers: str) -> Script:
    return lambda handler, request: handler.reply(code, body, headers)


def say(body: object, **headers: str) -> Script:
    return lambda handler, request: handler.reply(200, body, headers)


def hang_up(after: bytes = b"") -> Script:
    """Close the connection, perhaps in the middle of a reply."""

    def act(handler: Handler, request: dict) -> None:
        handler.wfile.write(after)
        handler.close_connection = True

    return act


def trickle(every_s: float, count: int) -> Script:
    def act(handler: Handler, request: dict) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            for _ in range(count):
                handler.wfile.write(b" ")
                time.sleep(every_s)
        except OSError:  # the client has gone
            pass

    return act
