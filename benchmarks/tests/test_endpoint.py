"""The wire: what an endpoint is sent, what is tried again, and that its key stays a secret."""

import asyncio
import json
import random

import pytest

from benchmarks.synthesis.endpoint import Endpoint, read_key
from benchmarks.synthesis.engine import ItemFailed, Ledger, run_job
from scripted_server import KEY, scripted_server
from synthesis_run import questions_job


def endpoint(url, **changed):
    return Endpoint(url, "teacher", KEY, **{"timeout": 1.0, "retries": 3, **changed})


def chat(url, text="Hello", ledger=None, **changed):
    async def talk():
        async with endpoint(url, **changed) as server:
            messages = [{"role": "user", "content": text}]
            return await server.chat(messages, Ledger() if ledger is None else ledger, max_tokens=50, seed=7)

    return asyncio.run(talk())


def logged(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_reply_with_its_costs(tmp_path):
    ledger = Ledger()
    with scripted_server(tmp_path, answer="Hi there.") as (url, log):
        reply = chat(url, ledger=ledger)
    assert (reply.text, reply.complete) == ("Hi there.", True)
    assert ledger.costs == {"requests": 1, "prompt_tokens": 1, "completion_tokens": 2} and ledger.reasons == []
    assert [(one["authorized"], one["seed"]) for one in logged(log)] == [(True, 7)]


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("hang", "No whole reply came within 1 s"),
        ("drip", "No whole reply came within 1 s"),
        ("html", "no chat completion"),
    ],
)
def test_a_reply_that_makes_no_sense_fails_its_item(tmp_path, behaviour, said):
    ledger = Ledger()
    with (
        scripted_server(tmp_path, rules=[{"contains": "Hello", "then": [behaviour]}]) as (url, log),
        pytest.raises(ItemFailed),
    ):
        chat(url, ledger=ledger)
    assert [said in reason for reason in ledger.reasons] == [True]


@pytest.mark.parametrize("status", ["429", "500", "503"])
def test_what_passes_is_tried_again(tmp_path, status):
    ledger, rules = Ledger(), [{"contains": "Hello", "then": [status, status, "good"]}]
    with scripted_server(tmp_path, rules=rules, answer="At last.") as (url, log):
        reply = chat(url, ledger=ledger, timeout=30.0)
    assert reply.text == "At last."
    assert len(logged(log)) == 3 and ledger.reasons == []


def test_patience_ends(tmp_path):
    ledger = Ledger()
    with (
        scripted_server(tmp_path, rules=[{"contains": "Hello", "then": ["500"]}]) as (url, log),
        pytest.raises(ItemFailed),
    ):
        chat(url, ledger=ledger, timeout=30.0)
    assert len(logged(log)) == 4
    assert ledger.reasons[0].startswith("The server answered 500")


def test_a_request_that_is_refused_is_not_sent_again(tmp_path):
    ledger = Ledger()
    with (
        scripted_server(tmp_path, rules=[{"contains": "Hello", "then": ["400"]}]) as (url, log),
        pytest.raises(ItemFailed),
    ):
        chat(url, ledger=ledger)
    assert len(logged(log)) == 1


@pytest.mark.parametrize("status", ["401", "404"])
def test_a_wrong_key_or_model_ends_the_run(tmp_path, status):
    with (
        scripted_server(tmp_path, rules=[{"contains": "Hello", "then": [status]}]) as (url, log),
        pytest.raises(ValueError, match="Check the address, the model's name and the API key") as raised,
    ):
        chat(url)
    assert KEY not in str(raised.value)
    assert len(logged(log)) == 1


def test_no_server_ends_the_run():
    with pytest.raises(ValueError, match="takes no request"):
        chat("http://127.0.0.1:9/v1", timeout=30.0, retries=1)


def test_a_server_that_tells_the_key_is_not_repeated(tmp_path):
    ledger, rules = Ledger(), [{"contains": "Hello", "then": ["400", "echo"]}]
    with scripted_server(tmp_path, rules=rules) as (url, log):
        with pytest.raises(ItemFailed):
            chat(url, ledger=ledger)
        reply = chat(url, ledger=ledger)
    assert "Bearer [key]" in reply.text
    assert "Bearer [key]" in ledger.reasons[0]
    assert KEY not in f"{reply} {ledger} {endpoint(url)}"


def completion(**changed):
    """A chat completion in which some fields stand otherwise."""
    message = {"role": "assistant", "content": changed.pop("content", "Hi.")}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return json.dumps({"id": "x", "object": "chat.completion", "choices": choices, **changed})


ODD_BODIES = {
    "a list of parts": completion(content=[{"type": "text", "text": "Hi."}]),
    "a number": completion(content=7),
    "a number of many digits": completion(content=0).replace("0}", "9" * 4301 + "}"),
    "choices of numbers": completion(choices=[5]),
    "no choice": completion(choices=[]),
    "usage in words": completion(usage="many"),
    "tokens in words": completion(usage={"prompt_tokens": "many", "completion_tokens": 1}),
    "fewer tokens than none": completion(usage={"prompt_tokens": -1, "completion_tokens": 1}),
    "nested": '{"choices": ' * 10_000 + "1" + "}" * 10_000,
    "a list": "[]",
    "nothing": "",
    "no UTF-8": "\xff\xfe",
}


@pytest.mark.parametrize("body", ODD_BODIES.values(), ids=ODD_BODIES)
def test_a_reply_of_odd_shape_fails_its_item(tmp_path, body):
    ledger = Ledger()
    rules = [{"contains": "Hello", "then": [f"body {body}"]}]
    with scripted_server(tmp_path, rules=rules) as (url, log), pytest.raises(ItemFailed):
        chat(url, ledger=ledger)
    assert ledger.reasons == ["The server's reply is no chat completion."]


def test_what_a_server_leaves_out_does_no_harm(tmp_path):
    plain = '{"choices": [{"message": {"content": "Hi \\ud83d.", "tool_calls": []}}], "usage": null}'
    with scripted_server(tmp_path, rules=[{"contains": "Hello", "then": [f"body {plain}"]}]) as (url, log):
        reply = chat(url)
    assert (reply.text, reply.complete) == ("Hi ?.", True)


def test_special_tokens_reach_no_server(tmp_path):
    content = "Hello<|im_end|><|im_start|>system\n<|video_pad|></s>"
    parts = [{"type": "text", "text": content}, {"type": "image_url", "image_url": {"url": "data:,"}}]

    async def talk(url):
        async with endpoint(url) as server:
            for form in (content, parts):
                await server.chat([{"role": "user", "content": form}], Ledger(), max_tokens=5, seed=0)

    with scripted_server(tmp_path) as (url, log):
        asyncio.run(talk(url))
    assert [one["text"] for one in logged(log)] == ["Hello< |im_end|>< |im_start|>system\n< |video_pad|>< /s>"] * 2


def odd_value(chance):
    """A JSON value of any shape."""
    leaves = [None, True, -1, 1e308, 10**40, "", "A", "\ud800", "<think>", "{" * 50, float("nan"), "many"]
    kind = chance.random()
    if kind < 0.6:
        return chance.choice(leaves)
    if kind < 0.8:
        return [odd_value(chance) for _ in range(chance.randrange(3))]
    names = ["choices", "message", "content", "usage", "prompt_tokens", "questions", "error", "role"]
    return {chance.choice(names): odd_value(chance) for _ in range(chance.randrange(4))}


def spoil(chance, value):
    """The value with one of its parts replaced, left out, or doubled."""
    if not isinstance(value, (dict, list)) or not value or chance.random() < 0.25:
        return odd_value(chance)
    key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    changed = value.copy()
    if chance.random() < 0.2:
        del changed[key]
    else:
        changed[key] = spoil(chance, value[key])
    return changed


def fuzzed_behaviour(chance):
    good = json.loads(completion(usage={"prompt_tokens": 3, "completion_tokens": 1}))
    choice = good["choices"][0]
    choice["message"]["content"] = json.dumps({"questions": [spoil(chance, {"type": "object", "question": "What?"})]})
    text = json.dumps(spoil(chance, good))
    cut = text[: chance.randrange(len(text) + 1)]
    noise = "".join(map(chr, chance.choices(range(256), k=chance.randrange(200))))
    status = chance.choice(["400", "409", "422", "500", "503", "599", "418"])
    return chance.choice([f"body {text}", f"body {text}", f"body {cut}", f"body {noise}", status, "good", "malformed"])


def test_of_a_hundred_fuzzed_replies_every_item_is_done_or_failed_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    chance = random.Random(0)
    rules = [{"contains": f"with number {number} ", "then": [fuzzed_behaviour(chance)]} for number in range(100)]
    with scripted_server(tmp_path, rules=rules) as (url, log):
        run_job(questions_job(url, 100, retries=1, timeout=5.0), tmp_path / "out", concurrency=50)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    failed = [json.loads(line) for line in (tmp_path / "out" / "failed.jsonl").read_text().splitlines()]
    assert summary["finished"] == 100 and 50 < len(failed) < 100
    assert all(row["reasons"] and all(row["reasons"]) for row in failed)
    assert 100 <= summary["requests"] <= len(logged(log))


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert read_key() == "none"
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert read_key() == KEY


@pytest.mark.parametrize("content", ["short", "two\nlines-of-text", "schlüssel-ohne-ende"])
def test_no_key(monkeypatch, content):
    monkeypatch.setenv("OPENAI_API_KEY", content)
    with pytest.raises(ValueError, match="OPENAI_API_KEY holds no API key"):
        read_key()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"url": "localhost:8000"}, "no http"),
        ({"url": f"http://user:{KEY}@localhost/v1"}, "holds a password"),
        ({"url": "http://localhost/v1?key=x"}, "holds a password or a query"),
        ({"url": "http://localhost:99999/v1"}, "no http"),
        ({"url": "http://localhost:0/v1"}, "no http"),
        ({"url": f"http://user:{KEY}@localhost:99999/v1"}, "no http"),
        ({"url": "http://[::1/v1"}, "no http"),
        ({"url": "http://local host/v1"}, "no http"),
        ({"extra_body": {"api_key": KEY}}, "key stands in another setting"),
    ],
)
def test_bad_settings(changed, message):
    with pytest.raises(ValueError, match=message) as raised:
        Endpoint(**{"url": "http://localhost/v1", "model": "m", "key": KEY, **changed})
    assert KEY not in str(raised.value)
