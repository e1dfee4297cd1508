"""Uploading: a finished folder reaches a hub (one that runs here, on loopback) whole, with a card; early errors."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from small_models import save_llama

from common import checkpoint

ROOT = Path(__file__).resolve().parents[1]


class TinyHub(BaseHTTPRequestHandler):
    """What an upload asks of the hub: who am I, make a repository, how to send these files, here they are."""

    def do_GET(self):
        allowed = self.headers.get("Authorization") == "Bearer hf_good"
        self.answer(200 if allowed else 401, {"name": "ann"} if allowed else {"error": "Invalid user token"})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            name = json.loads(body)["name"]
            return self.answer(200, {"url": f"{self.server.url}/ann/{name}"})
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            return self.answer(200, {"files": modes})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        lines = [json.loads(line) for line in body.splitlines()]
        files = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
        self.server.received[self.path] = {name: base64.b64decode(content) for name, content in files.items()}
        return self.answer(200, {"commitUrl": f"{self.server.url}/ann/m/commit/1", "commitOid": "1", "success": True})

    def answer(self, status: int, body: dict):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def tiny_hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), TinyHub)
    server.url, server.received = f"http://127.0.0.1:{server.server_port}", {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def run(folder: Path, *flags, **environment) -> subprocess.CompletedProcess:
    pairs = [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": "No."} for i in range(20)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    if not (folder / "data").exists():
        save_llama(folder / "base")
        prepare = [sys.executable, str(ROOT / "step0_data/prepare.py"), "--dataset", "pairs.jsonl"]
        subprocess.run(prepare, cwd=folder, check=True, capture_output=True)
    command = [sys.executable, str(ROOT / "step1_sft/train.py"), "--model=base", "--data=data", "--max_steps=1"]
    env = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
    env |= {"HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1"} | environment
    return subprocess.run([*command, *flags], cwd=folder, capture_output=True, text=True, env=env, timeout=120)


def test_every_file_of_the_finished_folder_arrives_and_a_card(tiny_hub, tmp_path):
    done = run(tmp_path, "--push_to_hub", "--hub_model_id", "ann/m", HF_ENDPOINT=tiny_hub.url, HF_TOKEN="hf_good")
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"uploaded to {tiny_hub.url}/ann/m" in done.stdout
    (received,) = tiny_hub.received.values()
    listed = checkpoint.read_stage(tmp_path / "models/sft")["files"]
    assert received.keys() == {*listed, "README.md"} and "model.safetensors" in received
    for name in listed:
        assert received[name] == (tmp_path / "models/sft" / name).read_bytes(), name
    card = received["README.md"].decode()
    assert "library_name: transformers" in card and "| `loss` |" in card and "| `learning_rate` | 1e-05 |" in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (["--hub_model_id", "ann/m"], {}, "--hub_model_id says where, but nothing is uploaded without --push_to_hub"),
        (["--push_to_hub"], {}, "--push_to_hub needs an account: run `hf auth login`, or set HF_TOKEN"),
        (["--push_to_hub"], {"HF_TOKEN": "hf_bad"}, "the hub does not answer or refuses the token"),
        (["--push_to_hub"], {"HF_TOKEN": "hf_good", "HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE=1"),
    ],
)
def test_what_cannot_be_uploaded_is_said_before_training(tiny_hub, tmp_path, flags, environment, message):
    done = run(tmp_path, *flags, HF_ENDPOINT=tiny_hub.url, **environment)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: ") and message in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "models").exists()


def test_a_hub_that_fails_at_the_end_does_not_cost_the_model(tiny_hub, tmp_path):
    tiny_hub.RequestHandlerClass = type(
        "Broken", (TinyHub,), {"do_POST": lambda self: self.answer(403, {"error": "no"})}
    )
    done = run(tmp_path, "--push_to_hub", HF_ENDPOINT=tiny_hub.url, HF_TOKEN="hf_good")
    assert done.returncode == 0 and "warning: not uploaded" in done.stdout and "hf upload sft models/sft" in done.stdout
    assert (tmp_path / "models/sft/stage.json").exists()
