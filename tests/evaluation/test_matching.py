"""Which texts count as right: by rules, measured on answers that were graded by hand, and by a judge."""

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from judge_agreement import agreement, graded_answers
from qtsplus.asking.choice import Choice
from qtsplus.cli import app
from qtsplus.data.records import VideoRecord
from qtsplus.evaluation.evaluate import evaluate_records
from qtsplus.evaluation.matching import gives_answer, is_exact, judge_at

AGREEMENT = Path(__file__).parents[2] / "benchmarks" / "results" / "matching.json"


@pytest.mark.parametrize(("name", "matcher"), [("answer", gives_answer), ("exact", is_exact)])
def test_rules_agree_with_two_hundred_answers_graded_by_hand(name, matcher):
    assert agreement(matcher) == json.loads(AGREEMENT.read_text())["agreement"][name]


DECIDED = Path(__file__).parent / "decided_answers.jsonl"  # an answer, its options, a sentence, whether it is right


@pytest.mark.parametrize("line", DECIDED.read_text(encoding="utf-8").splitlines())
def test_a_sentence_may_give_the_answer(line):
    answer, options, said, right = json.loads(line)
    assert gives_answer(VideoRecord(None, "What?", answer, options=options), said) == right


@pytest.mark.parametrize("kept", [0.1, 1.0])
def test_the_likeliest_option_is_an_option(loaded, tiny_mp4, kept):
    record = VideoRecord(str(tiny_mp4), "Which? A. red B. blue C. green", "B", options=("red", "blue", "green"))
    (outcome,) = evaluate_records(
        *loaded, [record], choice=Choice(retention=kept), matcher=gives_answer, by_likelihood=True
    )
    assert outcome.said in ("A", "B", "C")
    assert outcome.correct == (outcome.said == "B")
    with pytest.raises(ValueError, match="'Which. A. red' does not name its options"):
        evaluate_records(*loaded, [replace(record, question="Which? A. red")], by_likelihood=True)
    (free,) = evaluate_records(*loaded, [record], choice=Choice(retention=kept), matcher=gives_answer)
    assert free.said not in ("A", "B", "C"), "the tiny model says colours unless it has to choose"


@pytest.fixture
def judge_server():
    """An OpenAI-compatible server on loopback: it says yes to a first request, then what a test puts into `replies`."""
    seen = []
    replies = ["yes"]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["Content-Length"])
            seen.append(json.loads(self.rfile.read(length)))
            reply = replies.pop(0)
            message = {"role": "assistant", "content": reply}
            choices = [{"index": 0, "finish_reason": "stop", "message": message}] if reply else None
            answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": choices}
            body = json.dumps(answer).encode()
            self.send_response(reply if isinstance(reply, int) else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", replies, seen
    server.shutdown()


def test_a_judge_decides(judge_server, caplog):
    address, replies, seen = judge_server
    replies += ["Answer: Yes.", "no", "Perhaps", "Yes or no?"]
    judge = judge_at(address, "a-judge")
    record = VideoRecord(None, "Who knocks?", "her brother")
    assert judge(record, "The woman's brother")
    assert not judge(record, "The postman")
    for _ in range(2):
        assert not judge(record, "Nobody"), "one odd reply must not cost the answers of a whole evaluation"
    assert caplog.text.count("expected yes or no") == 2
    assert "The judge a-judge replied 'Perhaps'" in caplog.text
    (message,) = seen[1]["messages"]
    for text in ("Who knocks?", "her brother", "The woman's brother"):
        assert text in message["content"]


def test_a_judge_is_measured_on_answers_graded_by_hand(judge_server):
    address, replies, _ = judge_server
    graded = [right for _, _, right in graded_answers()]
    replies += ["yes"] * 200
    found = agreement(judge_at(address, "a-judge"))
    assert sum(counts["agreed"] for counts in found.values()) == sum(graded)


def test_the_command_asks_a_judge(judge_server, tiny_mp4, tiny_published, tmp_path):
    address, replies, _ = judge_server
    replies += ["yes", 400, None, 404]
    records = tmp_path / "records.jsonl"
    rows = [{"video": str(tiny_mp4), "question": f"{what}?", "answer": "her brother"} for what in ("Who", "So", "And")]
    records.write_text("\n".join(map(json.dumps, rows)))
    line = ["eval", str(records), "--model", str(tiny_published), "--json"]
    rules = json.loads(CliRunner().invoke(app, line).stdout)
    assert rules["accuracy"] == 0
    judged = [*line, "--match", "judge", "--judge", address, "--judge-model", "a-judge"]
    result = CliRunner().invoke(app, judged)
    assert json.loads(result.stdout)["accuracy"] == 1 / 3
    assert "2 questions about" in result.stderr
    assert f"The judge a-judge at {address} gave no chat completion: Error code: 400" in result.stderr
    refused = CliRunner().invoke(app, judged)
    assert refused.exit_code == 2
    assert "gave no chat completion: Error code: 404" in refused.stderr
    replies += ["yes", 400, 400, 400]
    assert CliRunner().invoke(app, judged).exit_code == 1, "an accuracy of 0 would be the judge's, not the model's"
    incomplete = CliRunner().invoke(app, [*line, "--judge", address])
    assert incomplete.exit_code == 2
    assert "--match judge, --judge and --judge-model belong together" in incomplete.stderr


def test_a_kind_that_is_called_all_has_its_own_row(tiny_mp4, tiny_published, tmp_path):
    records = tmp_path / "records.jsonl"
    rows = [{"video": str(tiny_mp4), "question": "Who?", "answer": "Ann", "kind": kind} for kind in ("all", "who")]
    records.write_text("\n".join(map(json.dumps, rows)))
    shown = CliRunner().invoke(app, ["eval", str(records), "--model", str(tiny_published)]).stdout
    kinds = [line.split()[1] for line in shown.splitlines() if "0.0%" in line]
    assert kinds == ["all", "who", "all"]
