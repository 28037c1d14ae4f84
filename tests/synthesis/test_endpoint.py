"""The wire: what an endpoint is sent, what is tried again, and that its key stays a secret."""

import asyncio
import json

import pytest

from qtsplus.synthesis.endpoint import Endpoint, EndpointSettings, read_key
from qtsplus.synthesis.engine import ItemFailed, Ledger
from scripted_server import KEY, scripted_server

SCHEMA = {"type": "object"}


def settings(url, **changed):
    return EndpointSettings(url, "teacher", KEY, **{"timeout": 1.0, "backoff": 0.01, "attempts": 4, **changed})


def chat(url, text="Hello", ledger=None, schema=None, times=1, logprobs=False, **changed):
    async def talk():
        ledger_ = ledger if ledger is not None else Ledger()
        async with Endpoint(settings(url, **changed)) as endpoint:
            asked = {"max_tokens": 50, "seed": 7, "schema": schema, "logprobs": logprobs}
            messages = [{"role": "user", "content": text}]
            return [await endpoint.chat(messages, ledger_, **asked) for _ in range(times)]

    return asyncio.run(talk())


def logged(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_reply_with_its_costs(tmp_path):
    ledger = Ledger()
    with scripted_server(tmp_path, answer="Hi there.") as (url, log):
        (reply,) = chat(url, ledger=ledger)
    assert (reply.text, reply.complete) == ("Hi there.", True)
    assert (ledger.requests, ledger.prompt_tokens, ledger.completion_tokens, ledger.reasons) == (1, 1, 2, [])
    assert [(one["authorized"], one["seed"]) for one in logged(log)] == [(True, 7)]


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("429", "answered 429"),
        ("500", "answered 500"),
        ("hang", "said nothing for 1 s"),
        ("html", "no chat completion"),
    ],
)
def test_what_passes_is_tried_again_and_written_down(tmp_path, behaviour, said):
    ledger = Ledger()
    rules = [{"contains": "Hello", "then": [behaviour, behaviour, "good"]}]
    with scripted_server(tmp_path, rules=rules, answer="At last.") as (url, log):
        (reply,) = chat(url, ledger=ledger)
    assert reply.text == "At last."
    assert ledger.requests == 3
    assert [said in reason for reason in ledger.reasons] == [True, True]


def test_patience_ends(tmp_path):
    ledger = Ledger()
    with (
        scripted_server(tmp_path, rules=[{"contains": "Hello", "then": ["500"]}]) as (url, log),
        pytest.raises(ItemFailed),
    ):
        chat(url, ledger=ledger)
    assert len(logged(log)) == len(ledger.reasons) == 4


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
        chat("http://127.0.0.1:9/v1", attempts=2)


def test_a_rate_limit_holds_up_every_request(tmp_path):
    """The second request comes while the first one waits, and is sent only when the pause is over."""
    rules = [{"contains": "first", "then": ["429 after 0.5", "good"]}]

    async def both(url):
        async with Endpoint(settings(url)) as endpoint:
            asked, started = {"max_tokens": 5, "seed": 0}, asyncio.get_running_loop().time()
            first = asyncio.create_task(endpoint.chat([{"role": "user", "content": "first"}], Ledger(), **asked))
            while endpoint.not_before == 0:
                await asyncio.sleep(0)
            pause = endpoint.not_before
            assert pause >= started + 0.5
            await endpoint.chat([{"role": "user", "content": "second"}], Ledger(), **asked)
            assert asyncio.get_running_loop().time() >= pause
            await first

    with scripted_server(tmp_path, rules=rules) as (url, log):
        asyncio.run(both(url))


def test_requests_per_minute(tmp_path):
    async def many(url):
        async with Endpoint(settings(url, requests_per_minute=1200)) as endpoint:
            started = asyncio.get_running_loop().time()
            asked = {"max_tokens": 5, "seed": 0}
            messages = [{"role": "user", "content": "Hello"}]
            await asyncio.gather(*(endpoint.chat(messages, Ledger(), **asked) for _ in range(5)))
            return endpoint.not_before - started

    with scripted_server(tmp_path) as (url, log):
        assert asyncio.run(many(url)) >= 5 * 60 / 1200


def test_a_schema_is_sent_until_the_server_refuses_it(tmp_path):
    with scripted_server(tmp_path, rules=[{"contains": "Hello", "then": ["no schema"]}]) as (url, log):
        chat(url, schema=SCHEMA, times=3)
    assert [one["schema"] for one in logged(log)] == [True, False, False, False]


def test_a_schema_goes_on_where_the_request_itself_is_bad(tmp_path):
    rules = [{"contains": "Hello", "then": ["400", "400", "good"]}]
    with scripted_server(tmp_path, rules=rules) as (url, log):

        async def talk():
            async with Endpoint(settings(url)) as endpoint:
                asked = {"max_tokens": 5, "seed": 0, "schema": SCHEMA}
                with pytest.raises(ItemFailed):
                    await endpoint.chat([{"role": "user", "content": "Hello"}], Ledger(), **asked)
                await endpoint.chat([{"role": "user", "content": "Hello"}], Ledger(), **asked)

        asyncio.run(talk())
    assert [one["schema"] for one in logged(log)] == [True, False, True]


def test_the_first_token_s_logprobs(tmp_path):
    with scripted_server(tmp_path, answer="B") as (url, log):
        (reply,) = chat(url, logprobs=True)
    assert max(reply.logprobs, key=reply.logprobs.get) == "B"


def test_a_server_that_tells_the_key_is_not_repeated(tmp_path):
    ledger = Ledger()
    rules = [{"contains": "Hello", "then": ["500", "echo"]}]
    with scripted_server(tmp_path, rules=rules) as (url, log):
        (reply,) = chat(url, ledger=ledger)
    assert "Bearer [key]" in reply.text
    assert "Bearer [key]" in ledger.reasons[0]
    assert KEY not in f"{reply} {ledger} {settings(url)}"


def test_the_key_comes_from_the_environment_or_a_file(tmp_path, monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    assert read_key("SOME_KEY") == "none"
    monkeypatch.setenv("SOME_KEY", KEY)
    assert read_key("SOME_KEY") == KEY
    (tmp_path / "key").write_text(f"{KEY[::-1]}\n")
    assert read_key("SOME_KEY", tmp_path / "key") == KEY[::-1]


@pytest.mark.parametrize("content", ["", "short", "two\nlines-of-text", "schlüssel-ohne-ende"])
def test_no_key(tmp_path, content):
    (tmp_path / "key").write_text(content)
    with pytest.raises(ValueError, match="holds no API key"):
        read_key("SOME_KEY", tmp_path / "key")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"url": "localhost:8000"}, "no http"),
        ({"url": f"http://user:{KEY}@localhost/v1"}, "holds a password"),
        ({"url": "http://localhost/v1?key=x"}, "holds a password or a query"),
        ({"model": " "}, "name is empty"),
        ({"timeout": 0}, "timeout is 0"),
        ({"requests_per_minute": float("inf")}, "requests_per_minute is inf"),
        ({"temperature": -1}, "temperature is -1"),
        ({"extra_body": {"api_key": KEY}}, "key stands in another setting"),
    ],
)
def test_bad_settings(changed, message):
    with pytest.raises(ValueError, match=message) as raised:
        EndpointSettings(**{"url": "http://localhost/v1", "model": "m", "key": KEY, **changed})
    assert KEY not in str(raised.value)
