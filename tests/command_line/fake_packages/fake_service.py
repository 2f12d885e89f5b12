"""The workers' and the coordinator's contract without any model. Told what to do wrong by FAKE_FAULT.

A coordinator answers /health, lists its model and streams completions that repeat the prompt; with FAKE_FAULT=differ
its text depends on speculation.
"""

import argparse
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULT = os.environ.get("FAKE_FAULT", "")


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        print(format % args, file=sys.stderr, flush=True)

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if self.path == "/v1/models":
            self.wfile.write(json.dumps({"data": [{"id": "target", "has_chat_template": False}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["max_tokens"] > 500:
            error = {"error": {"message": "max_tokens is too large", "param": "max_tokens"}}
            self.send_response(400)
            self.end_headers()
            self.wfile.write(json.dumps(error).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        is_on = body["speculation"]["enabled"]
        words = [f" w{i}" for i in range(min(body["max_tokens"], 6))]
        if FAULT == "differ" and is_on:
            words[-1] = " another"
        for i in range(0, len(words), 2):
            pair = words[i : i + 2]
            origins = ["accepted", "bonus"][: len(pair)] if is_on else ["plain"] * len(pair)
            detail = {"token_ids": [i, i + 1][: len(pair)], "origins": origins, "pieces": pair}
            self.send_event({"choices": [{"text": "".join(pair), "outrider": detail}]})
        drafted = len(words) if is_on else 0
        speculation = {
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": drafted // 2,
            "num_spec_steps": drafted // 2,
            "draft_acceptance_rate": 0.5,
            "mean_acceptance_length": 2.0,
        }
        usage = {"completion_tokens": len(words)}
        self.send_event({"choices": [], "usage": usage, "metrics": {"speculative_decoding": speculation}})
        self.wfile.write(b"data: [DONE]\n\n")

    def send_event(self, event: dict[str, object]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()


def run(role: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--grpc-port", type=int)
    parser.add_argument("--redis-url", required="OUTRIDER_REDIS_URL" not in os.environ)
    options, rest = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    print(f"{role} began with {rest}", file=sys.stderr, flush=True)
    if role == FAULT:
        print("no room for these weights", file=sys.stderr)
        sys.exit(1)
    address = f"{options.host}:{options.port}"
    ready = {"event": "ready", "role": role, "address": address, "pid": os.getpid()}
    if role != "coordinator":
        print(json.dumps(ready), flush=True)
        while True:
            time.sleep(600)
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    ready |= {"http": f"http://{address}", "grpc": f"{options.host}:{options.grpc_port}"}
    print(json.dumps(ready), flush=True)
    server.serve_forever()
