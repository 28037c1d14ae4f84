"""Selection by the language model's own attention, beside all that else can select: the command `attention`."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from qtsplus.common.journals import write_json
from qtsplus.model.lm_attention_qtsplus import attention_layer
from qtsplus.training.models import make_model, make_processor

from ..exact_match import model_inputs
from ..machine import environment
from ..speed.clock import busy
from .policies import ATTENTION, BASE, CONTROLLED, DEFAULT, WRONG_QUESTIONS, Policy, name_of, policies_of, title_of
from .questions import QuestionSet
from .statistics import question_driven, table_rows
from .work import Work

RETENTION = 0.1
TIMED = 24  # questions, one at a time


class GivenModels:
    """
    Models that are there already, for [`Work`].

    Args:
        base: whose attention selects.
        trained: the same language model with a trained selector, where there is one.
        work: where answers are kept.
        say: hears of each thing that is done.
    """

    def __init__(self, base: Path, trained: Path | None, work: Path, say: Callable[[str], None]):
        self.work, self.say = work, say
        self.base_model: Any = make_model(None, str(base)).eval()
        self.processor = make_processor(None, str(base), self.base_model.config)
        self.trained: Any = None if trained is None else make_model(None, str(trained)).eval()
        files = [file for folder in (base, trained) if folder for file in sorted(folder.glob("*.safetensors"))]
        weights = b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)
        selector = self.base_model.config.qtsplus_config
        self.setup = {
            "base": hashlib.sha256(weights).hexdigest(),
            "attention": {
                "layer": attention_layer(self.base_model.config.text_config, selector.attention_layer),
                "heads": selector.attention_heads,
                "group": selector.attention_group,
                "mass": selector.attention_mass,
            },
        }

    def load(self, seed: int, name: str) -> Any:
        return self.trained if name == DEFAULT else self.base_model


def chosen_policies(trained: bool) -> list[Policy]:
    """At a tenth of the tokens all that needs no training, with the controls of what looks at the question."""
    chosen = [
        policy
        for policy in policies_of(BASE, own_budget=False, adapted=True)
        if policy.retention in (None, 1.0, RETENTION)
        or (policy.selection == ATTENTION and policy.retention in CONTROLLED and policy.wrong_question is None)
    ]
    if trained:
        chosen.append(Policy(DEFAULT, DEFAULT, RETENTION))
        chosen += [Policy(wrong, DEFAULT, RETENTION, wrong_question=wrong) for wrong in WRONG_QUESTIONS]
    return chosen


def run_attention(
    bases: Sequence[Path],
    test: Path,
    out: Path,
    *,
    trained: Sequence[Path] = (),
    name: str = "lm-attention",
    work: Path = Path("runs/attention"),
    batch_size: int = 64,
    command: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """
    Asks bases of one backbone, and writes `NAME.json` and `NAME.md`. Nothing is trained.

    Args:
        bases: models that read all tokens; their configurations say which layer and heads are read.
        test: questions of `python -m benchmarks tinyworld --split test`.
        out: folder of the results.
        trained: for each base the same language model with a trained selector; none if empty.
        work: where answers are kept; what is there is not asked again.

    Raises:
        ValueError: another number of trained models than of bases, or an unfit test set.
    """
    if len(trained) not in (0, len(bases)):
        raise ValueError(f"{len(trained)} trained models for {len(bases)} bases: expected none, or one for each base.")
    questions = QuestionSet.read(test)
    results, seconds, setups, facts = [], [], [], {}
    for seed, base in enumerate(bases):
        models: Any = GivenModels(base, trained[seed] if trained else None, work, say)
        asked: Any = Work(models, questions, batch_size)
        policies = chosen_policies(bool(trained))
        results += asked.ask(seed, policies, seed)
        seconds.append(asked.once(seed, "seconds", lambda asked=asked, policies=policies: _seconds(asked, policies)))
        setups.append({"attention": models.setup["attention"]})
        facts = environment(str(models.base_model.device))
    kinds = [record.kind for record in questions.records]
    document = {
        "command": command,
        "environment": facts,
        "crowd": questions.crowd,
        "questions": len(kinds),
        "videos": len(questions.videos),
        "test_sha256": questions.digest,
        "bases": setups,
        "rows": table_rows(results, kinds, questions.crowd),
        "question_driven": question_driven(results, questions.records, questions.crowd),
        "seconds": seconds,
    }
    write_json(out / f"{name}.json", document)
    (out / f"{name}.md").write_text("\n".join(_report(document)) + "\n", encoding="utf-8")
    return out / f"{name}.json"


def _seconds(asked: Any, policies: Sequence[Policy]) -> dict[str, float]:
    """By policy the median time from features to an answer's first token, one question at a time, policies in turn."""
    timed = [policy for policy in policies if policy.layout == "full" and policy.wrong_question is None]
    timed = [policy for policy in timed if policy.retention in (1.0, RETENTION)]
    features = asked.features()
    found: dict[str, list[float]] = {policy.name: [] for policy in timed}
    for index, record in enumerate(asked.test.records[: TIMED + 1]):
        inputs = model_inputs(asked.processor, [record], features)
        for policy in timed:
            model = asked.models.load(0, policy.model)
            given = {key: value.to(model.device) if torch.is_tensor(value) else value for key, value in inputs.items()}
            retention = None if policy.selection == "all" else policy.retention
            began = busy(str(model.device))
            model.generate(**given, selection=policy.selection, retention=retention, max_new_tokens=1, do_sample=False)
            if index:  # the first warms up
                found[policy.name].append(busy(str(model.device)) - began)
    return {name: median(values) for name, values in found.items()}


def _report(document: dict[str, Any]) -> list[str]:
    """The tables."""
    pooled = [row for row in document["rows"] if row["seed"] is None]
    everything = next(row for row in pooled if row["policy"] == name_of("all", BASE))
    groups = [group for group in ("all", "point", "relation", "when_and_order") if group in everything["groups"]]
    count = len(document["bases"])
    read = "; ".join(f"layer {base['attention']['layer']}, {_heads(base)}" for base in document["bases"])
    columns = ["", "kept", *(group.replace("_", " ") for group in groups), "of all tokens'", "needle tokens", "seconds"]
    rows = []
    for row in sorted(pooled, key=lambda row: (-row["accuracy"], row["policy"])):
        times = [times[row["policy"]] for times in document["seconds"] if row["policy"] in times]
        timed = bool(times) and row["retention"] in (1.0, RETENTION)
        rows.append(
            [
                title_of(row["policy"]),
                f"{row['kept_fraction']:.1%}" + ("" if row["retention"] else " (own budget)"),
                *(f"{row['groups'][group]['accuracy']:.1%}" for group in groups),
                f"{row['accuracy'] / everything['accuracy']:.0%}" if everything["accuracy"] else "",
                "" if row["token_recall"] is None else f"{row['token_recall']:.1%}",
                f"{sum(times) / len(times):.3f}" if timed else "",
            ]
        )
    lines = [
        f"{document['questions']} questions on {document['videos']} held-out videos of the "
        f"{'crowded' if document['crowd'] else 'sparse'} world; {count} base{'s' if count > 1 else ''} ({read}). "
        "Nothing is trained but the base, and QTSplus where it stands beside. Seconds go from the encoded video to the "
        "first token, one question at a time, and on a CPU are the processor's; a tiny model's are those of its many "
        "small steps. What it costs a model of size is in docs/selection.md.",
        "",
        f"`{document['command']}`",
        "",
        *_table(columns, rows),
        "",
        "What the choice owes to the question: (own - wrong) / (own - uniform) in right answers, at a tenth of the "
        "tokens, with a 95% interval over videos. Another choice: 1 - Jaccard of the kept tokens.",
        "",
    ]
    shares = []
    for row in document["question_driven"]:
        if row["group"] in ("all", "point") and row["retention"] == RETENTION:
            share = row["share"]
            shares.append(
                [
                    title_of(row["model"]),
                    title_of(row["wrong_question"]).removeprefix("control: "),
                    row["group"],
                    *(f"{row[name]:.1%}" for name in ("own", "wrong", "uniform")),
                    f"{share['mean']:.0%} ({share['low']:.0%} to {share['high']:.0%})" if share else "",
                    f"{row['disagreement']:.1%}",
                ]
            )
    columns = ["", "selected by", "questions", "own", "wrong", "uniform", "share", "another choice"]
    return [*lines, *_table(columns, shares)]


def _heads(base: dict[str, Any]) -> str:
    heads = base["attention"]["heads"]
    return "all heads" if heads is None else f"heads {', '.join(map(str, heads))}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    return lines + ["| " + " | ".join(cells) + " |" for cells in rows]


__all__ = ["run_attention"]
