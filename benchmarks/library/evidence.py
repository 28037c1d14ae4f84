"""What evidence points at: questions about a crowded video, and two cameras of which one has seen what is asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qtsplus.asking.evidence import Interval
from qtsplus.asking.session import VideoSession
from qtsplus.common.journals import write_json

from ..intervals import percent_interval, share_interval
from ..machine import environment, steps
from ..tables import markdown_table
from ..world.crowd_questions import crowd_questions
from ..world.questions import Needle
from .world import Hidden, make_library, write_videos

PLAN = {"direction": 2, "attribute": 6, "existence": 2}  # what one object answers
CAMERAS = ("door", "yard")
MEASURES = {
    "seconds": "holds nine tenths of the object's seconds",
    "seconds overlap": "overlaps them (IoU, mean)",
    "place": "its box holds the object's middle",
    "place overlap": "its box overlaps the object's (IoU, mean)",
}
_WAYS = ("own", "of another question")


def run_evidence(
    model: Any, processor: Any, out: Path, work: Path, *, videos: int = 200, command: str = "", progress: bool = True
) -> Path:
    """
    Writes `evidence-crowd.json` and its page.

    Args:
        out: the folder of the results.
        work: where the videos are kept.
        videos: how many crowds, of which each stands beside another one in turn.
    """
    worlds, hidden = make_library(videos)
    folder = work / f"videos-{videos}"
    write_videos(folder, worlds)
    session = VideoSession(model, processor)
    rows: list[dict[str, Any]] = []
    with steps("evidence", videos, progress) as step:
        for number, world in enumerate(worlds):
            session.add(folder / f"{number:03d}.mp4", str(number))
            asked = crowd_questions(world, np.random.default_rng(number), multiple_choice=0.0, plan=PLAN)
            asked = [question for question in asked if len(question.evidence) == 1]
            answers = session.ask_many([question.question for question in asked], [str(number)], max_new_tokens=8)
            tops = [answer.evidence[0] for answer in answers]
            for place, (question, answer) in enumerate(zip(asked, answers, strict=True)):
                right = answer.answer.rstrip(".") == question.answer
                pairs = zip(_WAYS, (tops[place], tops[place - 1]), strict=True)
                judged = {way: judge(top, question.evidence[0]) for way, top in pairs}
                rows.append({"video": number, "right": right, **judged})
            step(f"video {number + 1}: {len(asked)} questions")
    cameras = [_which_camera(session, hidden, place, videos) for place in range(len(hidden))]
    document = {
        "command": command,
        "environment": environment(str(model.device)),
        "settings": {"videos": videos, "questions": len(rows), "of_two_cameras": len(cameras)},
        "rows": _summed([row for row in rows if row["right"]]),
        "right": _share([row["right"] for row in rows], [row["video"] for row in rows]),
        "cameras": {
            name: _share([row[name] for row in cameras], [row["video"] for row in cameras])
            for name in ("named", "control")
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    target = out / "evidence-crowd.json"
    write_json(target, document)
    target.with_suffix(".md").write_text("\n".join(_page(document)) + "\n", encoding="utf-8")
    return target


def judge(top: Interval, needle: Needle) -> dict[str, float]:
    """The surest stretch of an answer beside the places and times at which its object is seen: of each [`MEASURES`]."""
    start, end = min(seen.start for seen in needle), max(seen.end for seen in needle)
    both = max(min(top.end, end) - max(top.start, start), 0.0)
    union = top.end - top.start + end - start - both
    boxes = np.array([np.array(seen.box) / (*seen.frame, *seen.frame) for seen in needle if seen.box and seen.frame])
    held = np.concatenate([boxes[:, :2].min(0), boxes[:, 2:].max(0)])  # wherever it is seen
    middles = (boxes[:, :2] + boxes[:, 2:]) / 2
    inside = (middles >= top.box[:2]) & (middles <= top.box[2:])
    sides = np.minimum(held[2:], top.box[2:]) - np.maximum(held[:2], top.box[:2])
    shared = float(np.prod(sides.clip(0)))
    areas = [float(np.prod(np.subtract(box[2:], box[:2]))) for box in (held, top.box)]
    return {
        "seconds": float(both >= 0.9 * (end - start)),
        "seconds overlap": both / union,
        "place": float(both > 0 and inside.all(1).mean() >= 0.5),
        "place overlap": shared / (sum(areas) - shared),
    }


def _which_camera(session: VideoSession, hidden: Sequence[Hidden], place: int, videos: int) -> dict[str, Any]:
    """Whether the video of a hidden object is named, by its own question and by one whose object neither video has."""
    one = hidden[place]
    shown = [one.video, (one.video + 1 + place % (videos - 1)) % videos][:: 1 if place % 2 else -1]
    other = next(ask for ask in (*hidden[place:], *hidden) if ask.video not in shown)
    both, right = VideoSession(session.model, session.processor), CAMERAS[shown.index(one.video)]
    both.videos = {camera: session.videos[str(video)] for camera, video in zip(CAMERAS, shown, strict=True)}
    answer, of_other = both.ask_many([one.question, other.question], max_new_tokens=3)
    return {
        "video": one.video,
        "named": answer.evidence[0].name == right,
        "control": of_other.evidence[0].name == right,
    }


def _share(values: Sequence[float], videos: Sequence[int]) -> dict[str, float]:
    interval = share_interval(np.array(values, dtype=float), np.array(videos))
    return {**interval, "mean": float(np.mean(values)), "questions": len(values)}


def _summed(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    videos = [row["video"] for row in rows]
    return {way: {name: _share([row[way][name] for row in rows], videos) for name in MEASURES} for way in _WAYS}


def _page(document: dict[str, Any]) -> list[str]:
    settings, rows, cameras = document["settings"], document["rows"], document["cameras"]
    return [
        f"`{document['command']}`",
        "",
        f"{settings['questions']} questions about {settings['videos']} crowded videos of 8 s, each about one object; "
        f"{document['right']['mean']:.1%} are answered right, with the model's own budget. Of the right answers, the "
        "stretch with the most relevance (intervals: 95%, over videos):",
        "",
        *markdown_table(
            ["the first piece of evidence", "its own", "control: that of another question about the video"],
            [
                [told, *(percent_interval(rows[way][name]["mean"], rows[way][name]) for way in _WAYS)]
                for name, told in MEASURES.items()
            ],
        ),
        "",
        f"Two cameras, of which one has seen what is asked for ({settings['of_two_cameras']} questions about an object "
        "that is known by its colour, shape and mark; the other has mostly one of its colour and shape): the right "
        f"one is named in {percent_interval(cameras['named']['mean'], cameras['named'])}; by a question about "
        f"an object that neither has seen, in {percent_interval(cameras['control']['mean'], cameras['control'])}.",
    ]


__all__ = ["judge", "run_evidence"]
