"""A Hub on loopback: the calls that huggingface_hub makes to create a repository and to upload to it, over HTTP."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

LFS_FROM = 20_000  # bytes


@dataclass
class Hub:
    """What the server holds."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # uploaded, whether committed or not
    commits: int = 0


@contextmanager
def loopback_hub():
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self, content=None, status=200, headers=()):
            body = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def handle_call(self):
            path = self.path.partition("?")[0]
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            for pattern, kind in ROUTES:
                match = re.fullmatch(pattern, f"{self.command} {path}")
                if match:
                    return getattr(self, kind)(body, *match.groups())
            return self.answer({"error": "not found"}, 404)

        do_GET = do_POST = do_PUT = do_HEAD = handle_call

        def create(self, body):
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            if name in hub.repositories:
                return self.answer({"error": "You already created this model repo", "url": f"{hub.url}/{name}"}, 409)
            hub.repositories[name], hub.private[name] = (
                {},
                bool(asked.get("private")) or asked.get("visibility") == "private",
            )
            return self.answer({"url": f"{hub.url}/{name}", "name": name, "id": name})

        def yaml(self, body):
            asked = json.loads(body)
            front_matter = asked["content"].split("---")[1]
            known = yaml.safe_load(front_matter).keys() >= {"library_name", "tags"}
            errors = [] if known else [{"message": "no metadata"}]
            self.answer({"errors": errors, "warnings": []}, 200 if known else 400)

        def preupload(self, body, repository):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] >= LFS_FROM else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for file in json.loads(body)["files"]
            ]
            self.answer({"files": files})

        def batch(self, body, repository):
            objects = []
            for one in json.loads(body)["objects"]:
                entry = {"oid": one["oid"], "size": one["size"]}
                if one["oid"] not in hub.objects:
                    entry["actions"] = {"upload": {"href": f"{hub.url}/lfs/{one['oid']}", "header": {}}}
                objects.append(entry)
            self.answer({"transfer": "basic", "objects": objects})

        def put(self, body, oid):
            if hashlib.sha256(body).hexdigest() != oid:
                return self.answer({"error": "another content"}, 400)
            hub.objects[oid] = body
            return self.answer()

        def commit(self, body, repository):
            files = dict(hub.repositories[repository])
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    files[value["path"]] = hub.objects[value["oid"]]
                elif entry["key"] == "deletedFile":
                    del files[value["path"]]
            hub.repositories[repository] = files
            hub.commits += 1
            url = f"{hub.url}/{repository}/commit/{hub.commits:040x}"
            self.answer({"commitUrl": url, "commitOid": f"{hub.commits:040x}", "pullRequestUrl": None})

        def info(self, body, repository):
            if repository not in hub.repositories:
                return self.answer({"error": "no such repository"}, 404, [("X-Error-Code", "RepoNotFound")])
            files = [{"rfilename": name} for name in hub.repositories[repository]]
            named = {"id": repository, "modelId": repository, "private": hub.private[repository], "siblings": files}
            return self.answer({**named, "sha": "0" * 40, "tags": [], "downloads": 0, "likes": 0})

        def tree(self, body, repository):
            self.answer(
                [
                    {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for path, content in hub.repositories[repository].items()
                ]
            )

        def file(self, body, repository, name):
            content = hub.repositories.get(repository, {}).get(name)
            if content is None:
                return self.answer({"error": "no such file"}, 404, [("X-Error-Code", "EntryNotFound")])
            etag = hashlib.sha1(content).hexdigest()
            return self.answer(content, 200, [("ETag", f'"{etag}"'), ("X-Repo-Commit", "0" * 40)])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    (r"POST /api/repos/create", "create"),
    (r"POST /api/validate-yaml", "yaml"),
    (rf"POST /api/models/{NAME}/preupload/main", "preupload"),
    (rf"POST /api/models/{NAME}/commit/main", "commit"),
    (rf"POST /{NAME}\.git/info/lfs/objects/batch", "batch"),
    (r"PUT /lfs/(\w+)", "put"),
    (rf"GET /api/models/{NAME}", "info"),
    (rf"GET /api/models/{NAME}/tree/main", "tree"),
    (rf"(?:GET|HEAD) /{NAME}/resolve/main/([\w.-]+)", "file"),
]
