"""
An OpenAI-compatible server on loopback, a process of its own: what it answers, and how it fails, stands in a script.

A script is a JSON file: `rules` is a list of `{"contains": text, "then": [behaviour, ...]}`. The first rule whose text
is in a request says how its first, second, ... time ends (of each request by itself with `"each": true`); the last
behaviour goes on. What no rule names is answered well. `letters` maps a question to the letter that is answered.
"body ..." answers with those bytes, "drip" with one now and then for ever. `latency` is in seconds. Requests are logged
to `log`, a line of JSON each, with whether the key was right and never the key itself.
"""

import asyncio
import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

KEY = "sk-planted-0123456789abcdef"


class Server:
    def __init__(self, script):
        self.script = {"rules": [], "letters": {}, "latency": 0.0, "log": None, "answer": None, **script}
        self.times = Counter()
        self.log = Path(self.script["log"]) if self.script["log"] else None

    async def serve(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(re.search(rb"content-length: *(\d+)", head, re.I)[1])
                request = json.loads(await reader.readexactly(length))
                await self.answer(request, head.decode(), writer)
        except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
            pass
        finally:
            writer.close()

    async def answer(self, request, head, writer):
        text = said(request)
        behaviour = self.behaviour(text)
        if self.log:
            media = Counter(part["type"] for part in parts(request))
            entry = {"behaviour": behaviour, "authorized": f"Bearer {KEY}" in head, "text": text, "media": media}
            with self.log.open("a") as log:
                log.write(json.dumps({**entry, "seed": request.get("seed")}) + "\n")
        if self.script["latency"]:
            await asyncio.sleep(self.script["latency"])
        if behaviour == "drip":
            await self.never_end(writer)
        status, headers, content = self.respond(behaviour, request, text, head)
        if behaviour == "hang":
            await asyncio.sleep(3600)
        body = b"<html>Bad gateway</html>" if behaviour == "html" else json.dumps(content).encode()
        if behaviour.startswith("body "):
            body = behaviour[5:].encode("latin-1")
        lines = [f"HTTP/1.1 {status} X", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await writer.drain()

    async def never_end(self, writer):
        writer.write(b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.1)

    def behaviour(self, text):
        for rule in self.script["rules"]:
            if rule["contains"] in text:
                key = (rule["contains"], hashlib.sha256(text.encode()).digest() if rule.get("each") else None)
                self.times[key] += 1
                return rule["then"][min(self.times[key], len(rule["then"])) - 1]
        return "good"

    def respond(self, behaviour, request, text, head):
        status, _, pause = behaviour.partition(" after ")
        if status.isdigit():
            # A careless server: it tells everyone what key it was given.
            told = next((line for line in head.splitlines() if line.lower().startswith("authorization")), "")
            error = {"error": {"message": f"refused as told: {told}", "code": status}}
            return int(status), [f"Retry-After: {pause or 0.05}"], error
        content, reason = self.good(request, text), "stop"
        if behaviour == "malformed":
            content = "Sure! Here it is: {questions: [" + content[:40]
        elif behaviour == "truncated":
            content, reason = content[: len(content) * 3 // 5], "length"
        elif behaviour == "options":
            content = content.replace('"distractors": [', '"distractors": ["one too many", ')
        elif behaviour == "fenced":
            content = f"<think>{{}} hm</think>Here you are:\n```json\n{content}\n```"
        elif behaviour == "elsewhere":
            content = re.sub(r'"evidence": "[^"]*"', '"evidence": "words that stand nowhere"', content)
        elif behaviour == "repeats":
            content = "the dog runs and " * 15
        elif behaviour == "prose":
            content = "I cannot tell."
        elif behaviour == "echo":
            content = f"{content} {head}"
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(content.split())}
        usage["total_tokens"] = sum(usage.values())
        made = {"id": "x", "object": "chat.completion", "created": 0, "model": request["model"]}
        return 200, [], {**made, "choices": [choice], "usage": usage}

    def good(self, request, text):
        if "<caption>" in text:
            return json.dumps({"questions": questions(text)})
        for question, letter in self.script["letters"].items():
            if question in text and "\nA. " in text:
                return letter
        if "\nA. " in text:
            return "A"
        return self.script["answer"] or f"It is number {hashlib.sha256(text.encode()).hexdigest()[:6]}, as one can see."


def parts(request):
    for message in request["messages"]:
        content = message["content"]
        yield from [{"type": "text", "text": content}] if isinstance(content, str) else content


def said(request):
    """All that the request says but for the system's message."""
    turns = {**request, "messages": [turn for turn in request["messages"] if turn["role"] != "system"]}
    return "\n".join(part["text"] for part in parts(turns) if part["type"] == "text")


def questions(text):
    """Good questions about a caption, of the types that are asked for; the words of each differ."""
    caption = re.search(r"<caption>\n?(.*?)\n?</caption>", text, re.S)[1]
    sentences = [part.strip() for part in re.split(r"(?<=\.)\s", caption) if len(part.split()) > 2] or [caption]
    kinds = re.findall(r"^- (\w+):", text, re.M)
    made = []
    for number, kind in enumerate(kinds):
        evidence = sentences[number % len(sentences)]
        question = {"type": kind, "question": f"Which {kind} is shown here, in {len(caption)} of {number}?"}
        options = {"answer": f"sight {number}", "distractors": [f"{word} {number}" for word in ("ear", "eye", "leg")]}
        why = {"difficulty": "easy", "rationale": "It is said there.", "evidence": evidence}
        made.append({**question, **options, **why})
    return made


def files_with_key(folder):
    """The files of a folder, and of its folders, that hold the key."""
    return [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@contextmanager
def scripted_server(folder, **script):
    """Starts the server in a process of its own, and gives its address and the file of its log."""
    folder = Path(folder)
    log = folder / "requests.jsonl"
    (folder / "script.json").write_text(json.dumps({"log": str(log), **script}))
    command = [sys.executable, __file__, str(folder / "script.json")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1", log
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def main(script):
    server = await asyncio.start_server(Server(script).serve, "127.0.0.1", 0, limit=2**26)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
