"""vLLM's own OpenAI server with a published folder: many clients at once, budgets that cannot be, one who hangs up."""

import contextlib
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from PIL import Image

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import openai

import qtsplus
from clips import render_clip
from engine_runs import TOKENS, build, forget, processor_of, same_basis, send, serving, shown_text, write_folder
from tiny_backbones import QWEN2_5_VL

VIDEOS = 8
CLIENTS = 32
KEY = "correct horse"
QUESTIONS = []
for colour in ("red", "blue", "green", "yellow", "white", "black"):
    QUESTIONS.append(f"Where is the {colour} circle?")
    QUESTIONS.append(f"When do you see the {colour} circle?")
ATTENTION = {"selection": "lm_attention"}
DIVERSITY = {"selection": "diversity", "retention": 0.4}
NINE_TOKENS = {"max_visual_tokens": 9}
BUDGETS = (
    {"retention": 0.1},
    {"retention": 0.4},
    NINE_TOKENS,
    {},  # the model's own
    ATTENTION,
    ATTENTION | {"retention": 0.2},
    DIVERSITY,
)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    for seed in range(VIDEOS):
        render_clip(
            folder / f"{seed}.mp4",
            seconds=2 if seed else 6,  # 12 frames of the first, 4 of the others
            fps=8,
            size=(112, 112),
            seed=seed,
        )
    return folder


@pytest.fixture(scope="module")
def model():
    """(model, processor)."""
    processor = processor_of(QWEN2_5_VL)
    return build(QWEN2_5_VL, processor, attention_group=64), processor


@pytest.fixture(scope="module")
def server(tmp_path_factory, clips, model):
    published = write_folder(*model, tmp_path_factory.mktemp("served"))
    limits = {"video": 3, "image": 2}
    cache = {"qtsplus_cache_gb": 3e-5}  # room for the features of two videos
    options = [
        "--limit-mm-per-prompt",
        json.dumps(limits),
        "--additional-config",
        json.dumps(cache),
        "--block-size",
        32,
    ]
    with serving(published, clips, *options, own=("--api-key", KEY)) as address:
        yield address


def picture(clips):
    path = clips / "picture.png"
    Image.new("RGB", (84, 56), "red").save(path)
    return path


def video_part(clips, video):
    return {
        "type": "video_url",
        "video_url": {"url": f"file://{clips}/{video}.mp4"},
    }


@dataclass(frozen=True)
class Reply:
    """What a server answers: the `kept` tokens of each kind (`None` for a stream) and the basis of the answer."""

    text: str
    prompt_tokens: int
    kept: dict | None
    reused: int | None = field(compare=False)
    basis: dict | None


def ask(server, clips, videos, question, budget, **more):
    content = [video_part(clips, video) for video in videos]
    return ask_about(server, content, question, budget, **more)


def ask_about(server, content, question, budget, **more):
    content = [*content, {"type": "text", "text": question}]
    answer = send(server, content, budget, key=KEY, **more)
    if "stream" in more:
        return read_stream(answer)
    choice = answer.choices[0]
    details = answer.usage.prompt_tokens_details.model_dump()
    return Reply(
        text=choice.message.content,
        prompt_tokens=answer.usage.prompt_tokens,
        kept=details["multimodal_tokens"],
        reused=details["cached_tokens"],
        basis=getattr(choice, "qtsplus", None),
    )


def read_stream(answer):
    """The reply of a stream, whose last choice alone has the basis."""
    *events, usage = answer
    text = ""
    for event in events:
        text += event.choices[0].delta.content or ""
    *parts, last = events
    for part in parts:
        assert not hasattr(part.choices[0], "qtsplus")
    return Reply(
        text=text,
        prompt_tokens=usage.usage.prompt_tokens,
        kept=None,
        reused=None,
        basis=getattr(last.choices[0], "qtsplus", None),
    )


def test_answers_and_what_they_rest_on_are_those_of_transformers(server, clips, model):
    """As many clients at once ask their own questions about one video, of half of them the answer is streamed."""
    video = qtsplus.encode(*model, clips / "0.mp4")
    asked = [(question, budget) for budget in BUDGETS for question in QUESTIONS]

    def answered(number):
        more = {}
        if number % 2:
            more = {"stream": True, "stream_options": {"include_usage": True}}
        return ask(server, clips, [0], *asked[number], **more)

    with ThreadPoolExecutor(CLIENTS) as pool:
        together = list(pool.map(answered, range(len(asked))))
    counts = set()
    for (question, budget), reply in zip(asked, together, strict=True):
        answer = qtsplus.ask(
            *model,
            video,
            question,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            **budget,
        )
        here = answer.as_dict()
        assert shown_text(reply.text) == shown_text(here["answer"])
        if reply.kept is not None:
            assert reply.kept["video"] == here["kept_tokens"]
        same_basis(reply.basis, here)
        counts.add((str(budget), reply.basis["kept_tokens"]))
    assert len(counts) > len(BUDGETS)  # the question decides
    again = [answered(number) for number in range(len(asked))]
    assert again == together  # from vLLM's caches


def test_two_choices_of_a_stream_end_with_what_they_rest_on(server, clips):
    content = [video_part(clips, 0), {"type": "text", "text": QUESTIONS[0]}]
    told = {}
    for event in send(server, content, NINE_TOKENS, key=KEY, stream=True, n=2, temperature=1):
        for choice in event.choices:
            if choice.finish_reason:
                told[choice.index] = choice.qtsplus
            else:
                assert not hasattr(choice, "qtsplus")
    basis = ask(server, clips, [0], QUESTIONS[0], NINE_TOKENS).basis
    assert told == {0: basis, 1: basis}


def test_many_clients_get_what_each_would_get_alone(server, clips):
    draw = random.Random(0)
    asked = []
    for _ in range(2 * CLIENTS):
        count = draw.choice((1, 1, 2))
        videos = draw.sample(range(VIDEOS), count)
        asked.append((videos, draw.choice(QUESTIONS), draw.choice(BUDGETS)))
    asked.append(([], QUESTIONS[0], {}))

    def answered(request):
        return ask(server, clips, *request)

    def hang_up(number):
        question = f"What is number {number}?"
        with contextlib.suppress(openai.APITimeoutError):
            ask(server, clips, range(3), question, {"retention": 1.0}, timeout=0.3)

    with ThreadPoolExecutor(CLIENTS) as pool:
        gone = [pool.submit(hang_up, number) for number in range(2)]
        together = list(pool.map(answered, asked))
        for future in gone:
            future.result()
    forget(server, KEY)
    assert list(map(answered, asked)) == together
    assert [bool(reply.basis) for reply in together] == [bool(videos) for videos, _, _ in asked]
    different = set(map(str, together))
    assert len(different) > CLIENTS  # the requests are not all the same


def test_questions_that_choose_alike_share_the_prefill_of_their_video(server, clips):
    reused = {}
    for name, budget in ("alike", DIVERSITY), ("by question", {"retention": 0.4}):
        forget(server, KEY)
        for question in QUESTIONS[:2]:
            reused[name] = ask(server, clips, [0], question, budget).reused
    assert reused["alike"] > reused["by question"]


HALF = {"retention": 0.5}
REFUSED = (
    ({"retention": "much"}, "(0, 1]"),
    ({"retention": 0.5, "selection": "best"}, "selection='best'"),
    ({"retention": 0.5, "selection": "all"}, "keeps every visual token"),
    ({"retention": 0.5, "reencode": "no"}, "reencode='no'"),
    ({"retentoin": 0.5}, "mm_processor_kwargs has retentoin"),
    ({"min_pixels": 2_000_000, "max_pixels": 3_000_000}, "has max_pixels, min_pixels"),
)


def test_what_cannot_be_is_refused_and_the_server_stays(server, clips):
    for budget, reason in REFUSED:
        with pytest.raises(openai.BadRequestError) as refusal:
            ask(server, clips, [0], QUESTIONS[0], budget)
        assert reason in str(refusal.value), budget
    with pytest.raises(openai.BadRequestError, match="no text to select by"):
        ask(server, clips, [0], "", HALF)
    first = video_part(clips, 0)
    with pytest.raises(openai.BadRequestError, match=r"A text holds <\|video_pad\|>"):
        ask_about(server, [first], "What is <|video_pad|>?", HALF)


def test_an_image_between_two_videos_is_refused(server, clips):
    url = f"file://{picture(clips)}"
    image = {"type": "image_url", "image_url": {"url": url}}
    first = video_part(clips, 0)
    second = video_part(clips, 1)
    with pytest.raises(openai.BadRequestError, match="between two videos"):
        ask_about(server, [first, image, second], QUESTIONS[0], HALF)
    for content in ([image, first, second], [first, second, image]):
        assert ask_about(server, content, QUESTIONS[0], HALF)


def test_a_part_that_is_no_address_is_refused(server, clips):
    for part, kind in (
        ({"type": "image_pil", "image_pil": str(picture(clips))}, "image_url"),
        ({"image_pil": [f"{server}/health"]}, "image_url"),
        ({"type": "video_url", "video_url": None, "uuid": "none"}, "video_url"),
    ):
        content = [video_part(clips, 0), part]
        with pytest.raises(openai.BadRequestError, match=f"has no {kind}"):
            ask_about(server, content, QUESTIONS[0], HALF)


def test_a_prompt_that_is_truncated_is_answered_or_refused(server, clips):
    """By vLLM, in its text alone; a positions' table of another length ended the engine once."""
    content = [{"type": "text", "text": "Look. " * 20}, video_part(clips, 0)]
    whole = ask_about(server, content, QUESTIONS[0], NINE_TOKENS)
    lengths = set()
    for length in range(whole.prompt_tokens, 4, -5):
        for side in ("left", "right"):
            # A request is refused if it would lose part of the video or of the question.
            with contextlib.suppress(openai.BadRequestError):
                stated = {"truncate_prompt_tokens": length, "truncation_side": side}
                lengths.add(ask_about(server, content, QUESTIONS[0], NINE_TOKENS, **stated).prompt_tokens)
    assert len(lengths) > 2
    assert ask_about(server, content, QUESTIONS[0], NINE_TOKENS) == whole


def test_a_video_that_comes_twice_counts_twice(server, clips):
    forget(server, KEY)
    twice = ask(server, clips, [7, 7], QUESTIONS[0], {})
    once = ask(server, clips, [7], QUESTIONS[0], {})
    assert twice.basis["visual_tokens"] == 2 * once.basis["visual_tokens"]


def test_a_video_is_itself_whatever_a_client_calls_it(server, clips):
    """Under a name that another video had."""
    for video in (0, 1):
        named = {**video_part(clips, video), "uuid": "mine"}
        answer = ask_about(server, [named], QUESTIONS[0], {})
        assert answer == ask(server, clips, [video], QUESTIONS[0], {})
