"""QTS-VSCQ1: single-choice questions that a language model writes about captions (the paper's question synthesis)."""

import json
import random
import re
from typing import Any, Literal

from pydantic import BaseModel, ValidationError, field_validator

from qtsplus.common.validation import explain
from qtsplus.data.records import LETTERS, Caption, Choice, Text

from .endpoint import Endpoint
from .engine import Item, ItemFailed, Ledger
from .video_steps import strip_thoughts

PROMPTS = 2  # raised when the words below change, so that no run mixes two of them
PER_CAPTION = 3  # questions
ROUNDS = 3  # how often a reply may be asked for: the first, and those that mend it
MAX_TOKENS = 2048  # of a reply

_ASKS_FOR = {
    "object": "which person, animal or thing is seen or used",
    "attribute": "what something is like: its colour, size, material, clothing or state",
    "count": "how many of something there are, or how often something happens",
    "action": "what someone or something does",
    "spatial": "where something is or moves, seen from something else or within the frame",
    "temporal": "what comes before, after or at the same time, or how something changes",
    "causal": "why something happens, for what purpose, or what follows from it",
    "scene": "in which place, surroundings, weather or light it plays",
    "text": "what is written or shown as a sign, a label, a title or a number",
}
QUESTION_TYPES = tuple(_ASKS_FOR)

_SYSTEM = (
    "You write exam questions that test whether somebody has watched a video with care. You know the video only from a "
    "description of it. Whoever answers sees the video and never the description. You reply with one JSON object and "
    "nothing else."
)

_TASK = """Here is the description of a video.

<caption>
{caption}
</caption>

Write {count} single-choice questions about this video, one of each of these types:
{types}
If the description says nothing that a type could ask for, use another type from this list instead: {all_types}.

Rules for each question:
1. It asks about something that can be seen in the video. It never mentions a description, a caption or a text about the video.
2. It can be answered only by watching. Common sense and the wording of the options must not give the answer away.
3. "answer" is the right answer. "distractors" are exactly three wrong answers of the same kind, length and style. Each is plausible, clearly wrong, and different from the others.
4. Answers carry no letters, and neither "all of the above" nor "none of the above".
5. "evidence" is a passage of the description that shows the answer, copied word for word, at most 40 words.
6. "rationale" says in one sentence why the answer is right. It speaks of no letters and no options.
7. "difficulty" is easy for one glance, medium for a closer look, hard for what takes several moments of the video together.

Reply with this JSON object:
{{"questions": [{{"type": "...", "question": "...", "answer": "...", "distractors": ["...", "...", "..."], "difficulty": "easy|medium|hard", "rationale": "...", "evidence": "..."}}]}}"""  # noqa: E501

_MEND = """Some of this cannot be used:
{problems}

Write the whole JSON object again, with {count} questions that keep all the rules. Copy the evidence word for word."""

_SPEAKS_OF_TEXT = re.compile(
    r"\b(captions?|descriptions?|described|narrat(or|ion|ive)|passage|according to the text)\b", re.I
)
_SPEAKS_OF_LETTERS = re.compile(r"\b(options?|choices?|answers?)\s+\(?[A-D]\b|\b[A-D]\)", re.I)
_ALL_OF_THE_ABOVE = re.compile(r"\b(all|any|none|both) of (the above|these|them|the (options|answers))\b", re.I)
_FEWEST_WORDS = 3  # of evidence


class Draft(BaseModel):
    """A question as the language model writes it; we put its options in order."""

    type: Literal["object", "attribute", "count", "action", "spatial", "temporal", "causal", "scene", "text"]
    question: Text
    answer: Text
    distractors: list[Text]
    difficulty: Literal["easy", "medium", "hard"]
    rationale: Text
    evidence: Text

    @field_validator("type", "difficulty", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.strip().lower() if isinstance(value, str) else value


async def write_questions(endpoint: Endpoint, item: Item, ledger: Ledger) -> None:
    """The step from a [`Caption`] to [`Choice`]s, by a language model behind an endpoint."""
    caption: Caption = item.record
    start = first_messages(caption.caption, wanted_types(item))
    messages = start
    good: list[Draft] = []
    bad: list[tuple[dict[str, Any], str]] = []
    for number in range(ROUNDS):
        reply = await endpoint.chat(messages, ledger, max_tokens=MAX_TOKENS, seed=(item.seed + number) % 2**31)
        drafts, bad, problems = read_drafts(reply.text, caption.caption)
        good = max(good, drafts, key=len)
        if len(good) >= PER_CAPTION:
            break
        ledger.reasons.append(f"Reply {number + 1} could not be used: {'; '.join(problems)}.")
        mend = _MEND.format(problems="\n".join(f"- {problem}" for problem in problems), count=PER_CAPTION)
        messages = [*start, {"role": "assistant", "content": reply.text}, {"role": "user", "content": mend}]
    if not good and not bad:
        raise ItemFailed
    ledger.kept += [to_choice(draft, item, number).row() for number, draft in enumerate(good[:PER_CAPTION])]
    if len(good) < PER_CAPTION:
        ledger.dropped += [{"vision_id": caption.vision_id, "reason": why, "draft": draft} for draft, why in bad]


def wanted_types(item: Item) -> list[str]:
    """The types of a caption's questions, each another; every type stands in as many captions as any other."""
    start = item.position * PER_CAPTION
    return [QUESTION_TYPES[place % len(QUESTION_TYPES)] for place in range(start, start + PER_CAPTION)]


def first_messages(caption: str, types: list[str]) -> list[dict[str, Any]]:
    """The conversation that asks for questions of these types."""
    listed = "\n".join(f"- {kind}: {_ASKS_FOR[kind]}" for kind in types)
    # A caption cannot end its own frame.
    quoted = caption.replace("</caption>", "")
    task = _TASK.format(caption=quoted, count=len(types), types=listed, all_types=", ".join(QUESTION_TYPES))
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": task}]


def read_drafts(text: str, caption: str) -> tuple[list[Draft], list[tuple[dict[str, Any], str]], list[str]]:
    """
    Of a reply, the questions that can be used; the others, each with why; and all that is wrong, for the language model
    to mend.
    """
    entries = question_entries(text)
    if not entries:
        return [], [], ["the reply holds no JSON object with questions"]
    good: list[Draft] = []
    bad: list[tuple[dict[str, Any], str]] = []
    for entry in entries:
        try:
            draft = Draft.model_validate(entry)
        except ValidationError as error:
            bad.append((entry, f"not a question: {explain(error, entry)}"))
            continue
        reason = draft_fault(draft, caption)
        if reason is None and _plain(draft.question) in (_plain(other.question) for other in good):
            reason = "asked twice"
        if reason is None:
            good.append(draft)
        else:
            bad.append((entry, reason))
    problems = [f"question {entry.get('question')!r}: {reason}" for entry, reason in bad]
    if len(entries) < PER_CAPTION:
        problems.append(f"{PER_CAPTION} questions were asked for, {len(entries)} came")
    return good, bad, problems


def draft_fault(draft: Draft, caption: str) -> str | None:
    """Why a question cannot be used: a kind of fault, a colon, and what is particular. `None` for a good one."""
    options = [draft.answer, *draft.distractors]
    if len(options) != len(LETTERS):
        return f"wrong number of options: {len(options)}, not {len(LETTERS)}"
    if len({_plain(option) for option in options}) < len(options) or not all(map(_plain, options)):
        return "options not different"
    if any(_ALL_OF_THE_ABOVE.search(option) for option in options):
        return "an option about the others"
    if _SPEAKS_OF_TEXT.search(draft.question):
        return "the question speaks of the caption"
    if _SPEAKS_OF_LETTERS.search(draft.rationale):
        return "the rationale speaks of letters"
    if len(_plain(draft.answer)) > 3 and f" {_plain(draft.answer)} " in f" {_plain(draft.question)} ":
        return "the question holds the answer"
    evidence = _plain(draft.evidence)
    if len(evidence.split()) < min(_FEWEST_WORDS, len(_plain(caption).split())):
        return "evidence too short"
    if f" {evidence} " not in f" {_plain(caption)} ":
        return "evidence not in the caption"
    return None


def to_choice(draft: Draft, item: Item, number: int) -> Choice:
    """A caption's `number`-th draft, its options shuffled: of four questions in a row, each letter is right once."""
    caption: Caption = item.record
    place = item.position * PER_CAPTION + number
    letters = random.Random(place // len(LETTERS)).sample(LETTERS, len(LETTERS))
    answer = letters[place % len(LETTERS)]
    others = iter(random.Random(f"{item.id} {number}").sample(draft.distractors, len(draft.distractors)))
    options = {letter: draft.answer if letter == answer else next(others) for letter in LETTERS}
    shared = {"vision_id": caption.vision_id, "id": f"{item.id}-{number}", "fps": caption.fps}
    drafted = draft.model_dump(exclude={"answer", "distractors"})
    return Choice.model_validate({**shared, **drafted, "options": options, "answer": answer})


def _plain(text: str) -> str:
    """Only the words, in small letters: how quotes, dashes, stops and spaces are written makes no other text."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def question_entries(text: str) -> list[dict[str, Any]]:
    """The objects in the list that a reply should hold; words and fences around it do no harm. None of a broken one."""
    text = strip_thoughts(text)
    try:
        reply = json.loads(text[text.find("{") : text.rfind("}") + 1], strict=False)
    except (ValueError, RecursionError):
        return []
    questions = reply.get("questions")
    return [entry for entry in questions if isinstance(entry, dict)] if isinstance(questions, list) else []
