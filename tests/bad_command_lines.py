"""
Bad command lines, each a list of arguments.

A word in braces stands for a file or folder of the corpus that `tests/cli/test_bad_command_lines.py` makes.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import product

LONG = "x" * 5000
NO_COUNTS = ["0", "-1", "1.5"]
NO_RATES = ["0", "nan", "inf"]
NO_MODEL_NAMES = ["", "{missing}", "a/b/c", "org/na me", "ünïcode/модель", "https://example.invalid/model", LONG]
DOMAINS = ["", "http://a.org", "a.org/b", "a b", "*", "a.org:x", "user@a.org"]

# What an option may not be given, whichever command has it: of each kind three that are out of range.
NO_VALUES_OF = {
    "--max-visual-tokens": NO_COUNTS,
    "--max-new-tokens": NO_COUNTS,
    "--memory-tokens": NO_COUNTS,
    "--limit": NO_COUNTS,
    "--fps": NO_RATES,
    "--every": NO_RATES,
    "--chapter-seconds": NO_RATES,
    "--timeout": NO_RATES,
    "--retention": ["0", "1.0001", "nan"],
    "--device": ["toaster", "cuda:99", ""],
    "--selection": ["best", "", "uniform,random"],
    "--port": ["65536"] + NO_COUNTS,
    "--allow-host": DOMAINS + ["a.org:80"],
}
# What `<name>` stands for in a command line: each in its turn.
EACH: dict[str, list[str]] = {
    "video": [
        "{missing}.mp4",
        "{empty}",
        "{garbage}",
        "{cut}",
        "{text}",
        "/dev/null",
        "",
        " ",
        "clip\x00.mp4",
        "-",
        "ftp://example.invalid/a.mp4",
        "http://",
        "http://127.0.0.1:9/a.mp4",
        "http://[::1/a.mp4",
        "{missing}\nname.mp4",
    ]
    + [LONG],
    "few_videos": ["{missing}.mp4", "{empty}", "http://127.0.0.1:9/a.mp4"],
    "frames": ["{empty_folder}", "{uneven_frames}", "{broken_frames}"],
    "text": ["", "\n\t", "\udcff"],
    "model": NO_MODEL_NAMES
    + [
        "{video}",
        "{empty_folder}",
        "{stock}",
        "{cut_weights}",
        "{no_weights}",
        "{garbage_weights}",
        "{adapter}",
        "{broken_config}",
        "{list_config}",
        "{binary_config}",
        "{wrong_types}",
        "{foreign}",
        "{no_tokenizer}",
    ],
    "few_models": ["", "{missing}", "{empty_folder}"],
    "number": ["abc", "", LONG],
    "nul": ["\0"],
    "recipe": ["{missing}", "{frames}", "", "\0"],
    "library": ["", "{missing}", "{empty_folder}", "{video}", "\0", LONG],
    "file": ["{missing}", "{empty_folder}", "{video}", "{empty}", "", "\0", LONG],
    "place": ["{video}", "/dev/null/x", "\0"],
    "domain": DOMAINS,
    "served": ["{stock}", "{video}", "{cut_weights}", "{list_config}"],
    "converted": ["{video}", "{cut_weights}", "{no_weights}", "{list_config}", "{foreign}", "{adapter}", LONG],
    "published": ["{stock}", "{garbage_weights}", "{broken_config}", "{wrong_types}"],
    "repository": ["", "name", "a/b/c", "org/", "org/na me", "org/name.git", "орг/имя", LONG],
    "setting": [
        "",
        "=5",
        "n_max",
        "n_max=",
        "n_max=-1",
        "n_max=1.5",
        "n_max=many",
        "n_max=!!python/name:os.system",
        "n_max={a: [}",
        "n_max: 5",
        "rho_min=2",
        "rho_min=.nan",
        "gate=x",
        "selection=best",
        "nothing=1",
        "model_type=x",
        "reencode_rope=1",
        "dropout=1",
        "tau_s=0",
        "tau_s='0.5'",
        "scoring_layers=0",
        "ключ=1",
    ],
}
# Command lines: `<name>` stands for each of the texts of that name above, `<a|b>` for one and then the other, and
# `[--a|--b]` for each of these options with each value that it may not have.
LINES = r"""
ask <video> "What moves?" --model {model}
ask <frames> "What moves?" --model {model} --fps 2
ask {frames} "What moves?" --model {model}
ask {frames} "What moves?" --model {model} --fps 0
ask {video} <text> --model {model}
ask {video} "What moves?" --model=<model>
ask {video} "What moves?" --model {model} [--fps|--retention|--max-visual-tokens|--max-new-tokens]
ask {video} "What moves?" --model {model} [--device|--selection]
ask {video} "What moves?" --model {model} --fps=<number>
ask {video} "What moves?" --model {model} --max-new-tokens=<number>
ask {video} "What moves?" --model {model} <--dtype=float8|--dtype=|--dtype=torch.float32>
ask {video} "What moves?" --model {model} <--retentoin=0.5|extra|--json=yes|--fps>
ask <{video}|--json>
find <library> "What moves?"
find
find {video}
find {video} "What moves?" --moments 0
summarise <video> --model {model}
summarise {video} --model {model} [--fps|--retention|--chapter-seconds|--max-visual-tokens|--max-new-tokens|--selection]
summarise {video} --model {model} --subtitles 9
summarise {video} --model {model} --name *
summarise {video} --model {model} <--dry-run| >
watch <few_videos> "What moves?" --model {model} --timeout 0.2
watch {video} <text> --model {model}
watch {video} "What moves?" --model=<few_models>
watch {video} "What moves?" --model {model} --timeout 0.2 [--every|--fps|--timeout]
watch {video} "What moves?" --model {model} --timeout 0.2 [--memory-tokens|--max-new-tokens|--device]
watch {video} "What moves?" --model {model} --timeout 0.2 <--fps=1e-300|--fps=1e30>
watch {video} "What moves?" --model {model} --timeout 1e30
watch a={video} a={video} "What moves?" --model {model} --timeout 0.2
watch {video} {video} "What moves?" --model {model} --timeout 0.2
watch
watch <{video}|--json>
batch <file> --out {out}.jsonl --model {model}
batch <{text}|{captions}> --out {out}.jsonl --model {model}
batch {records} --out {out}.jsonl --model=<few_models>
batch {records} --model {model} --out=<place>
batch {records} --model {model} <--out=|--out={text}|--out={empty_folder}|--out={text}/x>
batch {records} --out {out}.jsonl --model {model} [--retention|--max-visual-tokens|--max-new-tokens]
batch {records} --out {out}.jsonl --model {model} [--fps|--selection|--device]
batch {records} --out {out}.jsonl --model {model} <--media-root=|--media-root= >
batch {records} --out {out}.jsonl --model {model} <--media-root={missing}|--media-root={text}>
batch {records} --out {out}.jsonl --model {model} extra
batch {records}
serve <few_models>
serve <served>
serve {model} [--port|--allow-host|--retention|--max-visual-tokens]
serve {model} <--host=|--host= >
serve {model} <--allow-media-root=|--allow-media-root={missing}|--allow-media-root={text}>
serve {model} --allow-media-root=<nul>
serve {model} --allow-media-domain=<domain>
serve {model} -- --enforce-eager
serve {model} --enforce-eager
serve
app --model=<few_models>
app --model={stock}
app --model {model} [--port|--allow-host]
app --model {model} extra
mcp <library>
mcp {empty_folder} --model {model} --port 8765 [--port|--allow-host]
mcp {empty_folder} --model {model} --api-key x
mcp {empty_folder} --model {model} --allow-host a.org
mcp {empty_folder} --model {model} extra
eval <file> --model {model}
eval {records} --model=<few_models>
eval {records} --model {model} [--retention|--device|--selection]
eval {records} --model {model} --selection all --retention 0.1
eval {records} --model {model} <--batch=2|extra|--json=1>
eval --json
convert <few_models> --out {out}
convert <converted> --out {out}
convert {stock} --out <{frames}|{stock}>
convert {stock} --out <place>
convert {stock} --out {out} --set=<setting>
convert {stock} --out {out} <--processor=|--processor={missing}|--processor={video}|--processor={empty_folder}>
convert {stock}
convert
convert {stock} --out {out} --sett n_max=5
publish <few_models> --to {out}
publish <published> --to {out}
publish {model} --to {out} --repo=<repository>
publish {model} --to {frames}
publish {model} --to <place>
publish {model}
publish
publish {model} --to=
demo <--out=|--out={frames}|--out={video}>
data bigworld
data check <{missing}|{empty}|{empty_folder}|/dev/null/x>
data check <nul>
data check <| >
data check {records} <--media-root=|--media-root={missing}|--media-root={video}>
data check {records} <extra|--json=1>
data check
train <recipe>
train <recipe> --dry-run
train
train {recipe} --sett a=1
train {recipe} --resume=yes
train {recipe} extra
train {recipe} --set model.variant=null --set <model.weights={wrong_types}|model.weights={foreign}>
train {recipe} --set model.variant=null --set model.weights={missing}
"""


def expand(line: str) -> Iterator[list[str]]:
    """The command lines that one of [`LINES`] stands for."""
    words = re.findall(r'(?:[^\s<"]|<[^>]*>|"[^"]*")+', line)
    for choice in product(*map(alternatives, words)):
        yield list(choice)


def alternatives(word: str) -> list[str]:
    if word.startswith("["):
        names = word.strip("[]").split("|")
        return [f"{name}={value}" for name in names for value in NO_VALUES_OF[name]]
    placeholder = re.search("<(.*)>", word)
    if placeholder is None:
        return [word.replace('"', "")]
    values = placeholder[1].split("|")
    if len(values) == 1:
        values = EACH[placeholder[1]]
    return [word.replace(placeholder[0], value) for value in values]


def each_value(command: list[str], name: str, values: Iterable[str]) -> list[list[str]]:
    return [command + [f"{name}={value}"] for value in values]


def wrong(command: list[str], *names: str) -> list[list[str]]:
    """The command with each of the options wrong, in each way."""
    return [line for name in names for line in each_value(command, name, NO_VALUES_OF[name])]


def thinned(lines: Iterable[list[str]]) -> list[list[str]]:
    """Without an option's value that another command is given too, where the command has others for that option."""
    met: set[tuple[str, ...]] = set()
    few = []
    for line in lines:
        name, equals, value = line[-1].partition("=")
        is_option = bool(equals) and name.startswith("--")
        seen = {(name, value), (line[0], name)}
        if not is_option or not seen <= met:
            few.append(line)
        met |= seen
    return few


# What no field of a record may hold, by the field.
NO_VALUES = {
    "video": ("5", "[]", '["a.mp4"]', '""', '" "', "1e400", '"\\ud800"'),
    "question": ("5", "null", '["What?"]', '""', '"\\udfff"'),
    "answer": ("5", "null", '{"text": "red"}', '"\\ud800x"'),
    "query": ("5", "[]", '""', '"  "'),
    "kind": ("5", "[]"),
    "source": ("5", '"guess"', '["vqa"]'),
    "options": ("5", '"AB"', "[1]", "[[]]", '{"A": "x"}'),
    "earlier": ("5", '["Q", "A"]', '[["Q"]]', '[["Q", 5]]', "[null]", '{"Q": "A"}', '[[["Q"], "A"]]'),
    "fps": ("0", "-1", '"2"', "true", "NaN", "Infinity", "1e400"),
}
GOOD = {"video": '"clip.mp4"', "question": '"What?"', "answer": '"red"'}


# Contents of a JSONL file, which hold no record.
NO_RECORDS = """\
{
[]
5
"text"
null
{}
{"video"}
video: a.mp4
NaN
# a comment
\x00
"""


def record_files() -> list[bytes]:
    """Contents of JSONL files, each with one record that cannot be used."""
    good = _line(GOOD)
    texts = NO_RECORDS.splitlines()
    for name, values in NO_VALUES.items():
        texts += [_line(GOOD | {name: value}) for value in values]
    for name in GOOD:
        fewer = dict(GOOD)
        del fewer[name]
        texts.append(_line(fewer))
    texts.append(good + good)
    texts.append(good + ",")
    texts.append(f"[{good}]")
    texts.append(good[:-1])
    texts.append(good.replace('"', "'"))
    texts.append("[" * 100_000)
    texts.append('{"a":' * 100_000)
    endless = "9" * 10_000
    texts.append(f'{{"video": {endless}}}')
    files = [text.encode("utf-8", "surrogatepass") for text in texts]
    files.append(good.encode("utf-16"))
    files.append(b"\x89PNG\r\n\x1a\n")
    cut = good[:20]
    files.append(f"{good}\n{cut}".encode())
    return files


def _line(fields: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"


RECIPE = """\
model: {{variant: qtsplus-tiny}}
data: {{train_files: [{records}]}}
training: {{output_dir: {out}, max_steps: 1, use_cpu: true, report_to: none, save_strategy: no}}
"""


NO_RECIPES = """\
# nothing|5|text|[]|- model|null|{|model: [|\t- x|a: b: c|*missing|models: {}|5: {}|null: {}|model: &a [*a]
model: !!python/object/apply:os.system ['true']|model: !foo {}|!!python/object:qtsplus.X {}|model: {? [a, b] : c}
model: 5|model: [variant]|training: [x]|model: {variant: qtsplus-tiny}|data: {train_files: [a]}
training: {output_dir: a}|model: {variant: qtsplus-tiny, variant: qtsplus-3b}
"""


def recipe_files() -> list[bytes]:
    """Contents of recipes that cannot be used."""
    texts = [text for line in NO_RECIPES.splitlines() for text in line.split("|")]
    texts += ["", "%YAML 9.9\n---\n{}", "---\na: 1\n---\nb: 2", "? [a]\n: b", "\x07", "[" * 5000, "{a: " * 5000]
    texts.append("model: {variant: qtsplus-tiny}\nmodel: {variant: qtsplus-3b}")
    files = [text.encode() for text in texts]
    files += [b"\xff\xfe\x00\x01", b"\x89PNG\r\n\x1a\n", "model: {}".encode("utf-16"), b"a: \x80"]
    return files


# A field of a recipe, and values that it may not have.
OVERRIDES = """
model.variant: qtsplus-99b | 5 | ../qtsplus-tiny
model.weights: /nonexistent | {{}} | {video} | {empty_folder} | {cut_weights} | {broken_config} | {foreign}
model.selector: [] | text | {{n_max: -1}} | {{n_max: many}} | {{nothing: 1}} | {{5: 5}} | {{gate: [x]}}
model.selector.n_max: 1.5
model.dtype: float8 | 5
model.attn_implementation: fastest | []
data.train_files: [] | 5 | [null] | [/nonexistent] | [''] | {{a: b}} | [{empty_folder}] | [{video}]
data.eval_files: 5 | [/nonexistent]
data.model_max_length: 0
data.processor_kwargs: 5 | {{fps: fast}} | {{fps: .nan}} | {{num_frames: [4]}} | {{fps: 1, num_frames: 4}}
data.features: true | {video}
training.output_dir: 5 | '' | {video}
training.bf16: yes | 1 | null
training.max_steps: x | true
training.learning_rate: true | .nan
training.seed: 4294967296 | 1.5
training.num_train_epochs: .nan
training.gradient_accumulation_steps: 1.5
training.lr_scheduler_type: fastest | 5
training.lr_scheduler_kwargs: '{{'
training.optim: best | null
training.save_strategy: sometimes
training.eval_strategy: steps
training.report_to: nobody | {{}}
training.warmup_steps: x
training.max_grad_norm: [1]
training.logging_steps: true
training.lora_rank: 1.5
training.lora_alpha: 0
training.sft_loss: best
training.muon_scale: x
training.retention_range: [] | [0.5, 0.1] | [0.1, .nan]
training.freeze_selector: yes
training.accelerator_config: {{nothing: 1}}
training.deepspeed: /nonexistent.json
training.nothing: 5
data.nothing: 5
model.nothing: 5
"""
ODD_OVERRIDES = (
    "|=|x|model=1|.variant=1|model..n_max=1|model.variant.x=1|training.seed:1|training.seed=[|training.seed=\0|"
    "training.seed=!!python/name:os.system|data.train_files.0=x|МОДЕЛЬ.вариант=1"
)


def override_lines() -> Iterator[list[str]]:
    settings = ODD_OVERRIDES.split("|")
    for row in OVERRIDES.strip().splitlines():
        name, _, values = row.partition(": ")
        settings += [f"{name}={value}" for value in values.split(" | ")]
    for setting in settings:
        yield ["train", "{recipe}", "--set", setting]


def command_lines() -> list[list[str]]:
    """All of them but those that read a record file or a recipe of their own."""
    lines = [words for line in LINES.strip().splitlines() for words in expand(line)]
    return thinned(lines + list(override_lines()))
