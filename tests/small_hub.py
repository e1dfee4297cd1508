"""A hub on this machine: serves data sets to `datasets` and `huggingface_hub`, or refuses them as the real one does."""

import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator

import yaml

COMMIT = f"{1:040}"
# How the hub refuses: status and the code it puts beside it. A name nobody has is 401 to those who are not logged in.
REFUSALS = {
    "someone/missing": (404, "RepoNotFound"),
    "someone/private": (401, ""),
    "someone/gated": (403, "GatedRepo"),
    "someone/forbidden": (403, ""),
    "someone/broken": (500, ""),
}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: dict[str, dict[str, bytes]]  # data set: its files
    gated_files: set[str]  # data sets anybody may look at, but not read

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        path, _, query = urllib.parse.unquote(self.path).partition("?")
        words = path.removeprefix("/api").removeprefix("/datasets/").split("/")
        name, action, rest = "/".join(words[:2]), "/".join(words[2:3]), "/".join(words[4:])
        if name in REFUSALS:
            return self.say(REFUSALS[name][0], b"{}", X_Error_Code=REFUSALS[name][1])
        files = self.files.get(name)
        if files is None:
            return self.say(404, b"{}", X_Error_Code="RepoNotFound")
        if action in ("", "revision"):
            head = files.get("README.md", b"").split(b"---\n")
            info = {"id": name, "sha": COMMIT, "tags": [], "private": False}
            info |= {"siblings": [{"rfilename": file} for file in files]}
            return self.say(200, info | {"cardData": yaml.safe_load(head[1]) if len(head) == 3 else {}})
        if action == "tree":
            return self.tree(files, rest, "recursive=true" in query)
        if action == "resolve" and name in self.gated_files:
            return self.say(403, b"", X_Error_Code="GatedRepo")
        if action == "resolve" and rest in files:
            digest = hashlib.sha1(files[rest]).hexdigest()
            return self.say(200, files[rest], X_Repo_Commit=COMMIT, ETag=f'"{digest}"')
        return self.say(404, b"{}", X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)

    def tree(self, files: dict[str, bytes], folder: str, recursive: bool) -> None:
        prefix = f"{folder}/" if folder else ""
        entries = {}
        for file, content in files.items():
            if not file.startswith(prefix):
                continue
            first, slash, _ = file.removeprefix(prefix).partition("/")
            if slash:
                entries[first] = {"type": "directory", "path": prefix + first, "oid": "0" * 40, "size": 0}
            if recursive or not slash:
                oid = hashlib.sha1(content).hexdigest()
                entries[file] = {"type": "file", "path": file, "oid": oid, "size": len(content)}
        if not entries:
            return self.say(404, b"{}", X_Error_Code="EntryNotFound")
        self.say(200, list(entries.values()))

    def say(self, status: int, content, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for header, value in headers.items():
            if value:
                self.send_header(header.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = answer

    def log_message(self, *_) -> None:
        pass


@contextlib.contextmanager
def serve(files: dict[str, dict[str, bytes]], gated_files: tuple[str, ...] = ()) -> Iterator[str]:
    """The address of a hub with these data sets, for HF_ENDPOINT, while the context lasts."""
    handler = type("Handler", (_Handler,), {"files": files, "gated_files": set(gated_files)})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
