"""
Bad command lines, each a list of arguments.

A word in braces stands for a file or folder of the corpus that `tests/cli/test_bad_command_lines.py` makes.
"""

from itertools import product

QUESTION = "What moves?"
LONG = "x" * 5000
NO_NUMBERS = ("abc", "", LONG)
# Of each kind three that are out of range.
NO_COUNTS = ("0", "-1", "1.5")
NO_FRACTIONS = ("0", "1.0001", "nan")
NO_RATES = ("0", "nan", "inf")
NAMES_OF_NO_MODEL = ("", "{missing}", "a/b/c", "org/na me", "ünïcode/модель", "https://example.invalid/model", LONG)
NO_MODELS = (
    *("{video}", "{empty_folder}", "{stock}", "{cut_weights}", "{no_weights}", "{garbage_weights}", "{adapter}"),
    *("{broken_config}", "{list_config}", "{binary_config}", "{wrong_types}", "{foreign}", "{no_tokenizer}"),
)
FEW_MODELS = ("", "{missing}", "{empty_folder}")
NO_VIDEOS = (
    *("{missing}.mp4", "{empty}", "{garbage}", "{cut}", "{text}", "/dev/null", "", " ", "clip\x00.mp4", "-", LONG),
    *("ftp://example.invalid/a.mp4", "http://", "http://127.0.0.1:9/a.mp4", "http://[::1/a.mp4", "{missing}\nname.mp4"),
)
FEW_VIDEOS = ("{missing}.mp4", "{empty}", "http://127.0.0.1:9/a.mp4")
NO_FRAMES = ("{empty_folder}", "{uneven_frames}", "{broken_frames}")
NO_TEXTS = ("", "\n\t", "\udcff")
SELECTIONS = ("best", "", "uniform,random")
NO_FILES = ("{missing}", "{empty_folder}", "{video}", "{empty}", "", "\x00", LONG)
NO_PLACES = ("{video}", "/dev/null/x", "\x00")
DOMAINS = ("", "http://a.org", "a.org/b", "a b", "*", "a.org:x", "user@a.org")
# What an option may not be given, whichever command has it.
NO_VALUES_OF = {
    **dict.fromkeys(("--max-visual-tokens", "--max-new-tokens", "--memory-tokens", "--limit"), NO_COUNTS),
    **dict.fromkeys(("--fps", "--every", "--timeout"), NO_RATES),
    "--retention": NO_FRACTIONS,
    "--device": ("toaster", "cuda:99", ""),
    "--selection": SELECTIONS,
    "--port": ("65536", *NO_COUNTS),
    "--allow-host": (*DOMAINS, "a.org:80"),
}


def thinned(lines: list[list[str]]) -> list[list[str]]:
    """Without an option's value that another command is given too, where the command has others for that option."""
    met: set[tuple[str, ...]] = set()
    few = []
    for line in lines:
        name, equals, value = line[-1].partition("=")
        if not equals or not name.startswith("--") or not {(name, value), (line[0], name)} <= met:
            few.append(line)
        met |= {(name, value), (line[0], name)}
    return few


def each_value(command: list[str], name: str, values: tuple[str, ...]) -> list[list[str]]:
    return [[*command, f"{name}={value}"] for value in values]


def wrong(command: list[str], *names: str) -> list[list[str]]:
    """The command with each of the options wrong, in each way."""
    return [line for name in names for line in each_value(command, name, NO_VALUES_OF[name])]


def with_model(command: str, *rest: str, names: tuple[str, ...] = FEW_MODELS) -> list[list[str]]:
    return [[command, *rest, f"--model={name}"] for name in names]


def ask_lines() -> list[list[str]]:
    ask = ["ask", "{video}", QUESTION, "--model", "{model}"]
    return [
        *(["ask", video, QUESTION, "--model", "{model}"] for video in NO_VIDEOS),
        *(["ask", folder, QUESTION, "--model", "{model}", "--fps", "2"] for folder in NO_FRAMES),
        *(["ask", "{frames}", QUESTION, "--model", "{model}", *more] for more in ([], ["--fps", "0"])),
        *(["ask", "{video}", question, "--model", "{model}"] for question in NO_TEXTS),
        *with_model("ask", "{video}", QUESTION, names=(*NAMES_OF_NO_MODEL, *NO_MODELS)),
        *wrong(ask, "--fps", "--retention", "--max-visual-tokens", "--max-new-tokens", "--device", "--selection"),
        *(line for name in ("--fps", "--max-new-tokens") for line in each_value(ask, name, NO_NUMBERS)),
        *each_value(ask, "--dtype", ("float8", "", "torch.float32")),
        *([*ask, more] for more in ("--retentoin=0.5", "extra", "--json=yes", "--fps")),
        *(["ask", *some] for some in (["{video}"], ["--json"])),
    ]


def find_and_summarise_lines() -> list[list[str]]:
    summarise = ["summarise", "{video}", "--model", "{model}"]
    return [
        *(["find", library, QUESTION] for library in ("", "{missing}", "{empty_folder}", "{video}", "\x00", LONG)),
        *(["find", *some] for some in ([], ["{video}"], ["{video}", QUESTION, "--moments", "0"])),
        *(["summarise", video, "--model", "{model}"] for video in NO_VIDEOS),
        *wrong(summarise, "--fps", "--retention", "--max-visual-tokens", "--max-new-tokens", "--selection"),
        *([*summarise, *more] for more in (["--subtitles", "9"], ["--dry-run"], ["--name", "*"], [" "])),
    ]


def watch_lines() -> list[list[str]]:
    rest = [QUESTION, "--model", "{model}", "--timeout", "0.2"]
    watch = ["watch", "{video}", *rest]
    return [
        *(["watch", video, *rest] for video in FEW_VIDEOS),
        *(["watch", "{video}", question, "--model", "{model}"] for question in NO_TEXTS),
        *with_model("watch", "{video}", QUESTION),
        *wrong(watch, "--every", "--fps", "--timeout", "--memory-tokens", "--max-new-tokens", "--device"),
        *each_value(watch, "--fps", ("1e-300", "1e30")),
        [*watch, "--timeout", "1e30"],
        ["watch", "a={video}", "a={video}", *rest],
        ["watch", "{video}", "{video}", *rest],
        *(["watch", *some] for some in ([], ["{video}"], ["--json"])),
    ]


def batch_lines() -> list[list[str]]:
    batch = ["batch", "{records}", "--out", "{out}.jsonl", "--model", "{model}"]
    return [
        *(["batch", path, *batch[2:]] for path in (*NO_FILES, "{text}", "{captions}")),
        *with_model("batch", "{records}", "--out", "{out}.jsonl"),
        *each_value(
            ["batch", "{records}", *batch[4:]], "--out", ("", "{text}", "{empty_folder}", "{text}/x", *NO_PLACES)
        ),
        *wrong(batch, "--retention", "--max-visual-tokens", "--max-new-tokens", "--fps", "--selection", "--device"),
        *each_value(batch, "--media-root", ("", " ", "{missing}", "{text}")),
        [*batch, "extra"],
        ["batch", "{records}"],
    ]


def serve_lines() -> list[list[str]]:
    serve = ["serve", "{model}"]
    return [
        *(["serve", model] for model in ("{stock}", "{video}", "{cut_weights}", "{list_config}", *FEW_MODELS)),
        *wrong(serve, "--port", "--allow-host", "--retention", "--max-visual-tokens"),
        *each_value(serve, "--host", ("", " ")),
        *each_value(serve, "--allow-media-root", ("", "{missing}", "{text}", "\x00")),
        *each_value(serve, "--allow-media-domain", DOMAINS),
        *([*serve, *more] for more in (["--", "--enforce-eager"], ["--enforce-eager"])),
        ["serve"],
    ]


def app_lines() -> list[list[str]]:
    app = ["app", "--model", "{model}"]
    return [
        *with_model("app", names=("{stock}", *FEW_MODELS)),
        *wrong(app, "--port", "--allow-host"),
        [*app, "extra"],
    ]


def mcp_lines() -> list[list[str]]:
    mcp = ["mcp", "{empty_folder}", "--model", "{model}"]
    places = ("8765", "127.0.0.1:0", "127.0.0.1:70000", "localhost", "::1:80", "a b:80", "http://a.org:80", LONG)
    return [
        *(["mcp", library] for library in ("", "{missing}", "{empty_folder}", "{video}", "\x00", LONG)),
        *each_value(mcp, "--http", ("", *places)),
        *wrong([*mcp, "--http", "127.0.0.1:8765"], "--allow-host"),
        *each_value(mcp, "--watch", ("", "-", "a b={video}", "door=-", "../x={video}", "x" * 81 + "={video}")),
        [*mcp, "--watch", "a={video}", "--watch", "a={video}"],
        *([*mcp, *more] for more in (["--api-key", "x"], ["--allow-host", "a.org"], ["extra"])),
    ]


def eval_lines() -> list[list[str]]:
    run = ["eval", "{records}", "--model", "{model}"]
    return [
        *(["eval", path, "--model", "{model}"] for path in NO_FILES),
        *with_model("eval", "{records}"),
        *wrong(run, "--retention", "--device", "--selection"),
        [*run, "--selection", "all", "--retention", "0.1"],
        *([*run, more] for more in ("--batch=2", "extra", "--json=1")),
        ["eval", "--json"],
    ]


def convert_lines() -> list[list[str]]:
    convert = ["convert", "{stock}", "--out", "{out}"]
    sources = (*FEW_MODELS, LONG, "{video}", "{cut_weights}", "{no_weights}", "{list_config}", "{foreign}", "{adapter}")
    settings = (
        *("", "=5", "n_max", "n_max=", "n_max=-1", "n_max=1.5", "n_max=many", "n_max=!!python/name:os.system"),
        *("n_max={a: [}", "n_max: 5", "rho_min=2", "rho_min=.nan", "gate=x", "selection=best", "nothing=1"),
        *("model_type=x", "reencode_rope=1", "dropout=1", "tau_s=0", "tau_s='0.5'", "scoring_layers=0", "ключ=1"),
    )
    return [
        *(["convert", source, "--out", "{out}"] for source in sources),
        *(["convert", "{stock}", "--out", out] for out in ("{frames}", "{stock}", *NO_PLACES)),
        *each_value(convert, "--variant", ("qtsplus-99b", "", "../qtsplus-tiny")),
        *each_value(convert, "--set", settings),
        *each_value(convert, "--processor", ("", "{missing}", "{video}", "{empty_folder}")),
        ["convert", "{stock}"],
        ["convert"],
        [*convert, "--sett", "n_max=5"],
    ]


def publish_lines() -> list[list[str]]:
    repositories = ("", "name", "a/b/c", "org/", "org/na me", "org/name.git", "орг/имя", LONG)
    models = (*FEW_MODELS, "{stock}", "{garbage_weights}", "{broken_config}", "{wrong_types}")
    return [
        *(["publish", model, "--to", "{out}"] for model in models),
        *(["publish", "{model}", "--to", "{out}", f"--repo={repository}"] for repository in repositories),
        *(["publish", "{model}", "--to", out] for out in ("{frames}", "{model}", *NO_PLACES)),
        ["publish", "{model}"],
        ["publish"],
        ["publish", "{model}", "--to="],
        *(["demo", f"--out={out}"] for out in ("", "{frames}", "{video}")),
    ]


def data_lines() -> list[list[str]]:
    check = ["data", "check"]
    return [
        ["data", "bigworld"],
        *([*check, "--no-media", path] for path in ("{missing}", "{empty}", "{empty_folder}", "/dev/null/x", "\x00")),
        *([*check, path] for path in ("", " ")),
        *each_value([*check, "{records}"], "--media-root", ("", "{missing}", "{video}")),
        *each_value([*check, "{records}"], "--against", ("", "{missing}", "{empty}", "{text}", "{garbage}", "\x00")),
        *([*check, "{records}", more] for more in ("extra", "--json=1")),
        [*check, "{records}", "--no-media", "--media-root", "{empty_folder}"],
        check,
    ]


# What no field of a record may hold, by the field.
NO_VALUES = {
    "video": ("5", "[]", '["a.mp4"]', '""', '" "', "1e400", '"\\ud800"'),
    "question": ("5", "null", '["What?"]', '""', '"\\udfff"'),
    "answer": ("5", "null", '{"text": "red"}', '"\\ud800x"'),
    "query": ("5", "[]", '""', '"  "'),
    "kind": ("5", "null", "[]"),
    "source": ("5", "null", '"guess"', '["vqa"]'),
    "options": ("5", '"AB"', "[1]", "[[]]", '{"A": "x"}'),
    "earlier": ("5", '["Q", "A"]', '[["Q"]]', '[["Q", 5]]', "[null]", '{"Q": "A"}', '[[["Q"], "A"]]'),
    "fps": ("0", "-1", '"2"', "true", "NaN", "Infinity", "1e400"),
}
GOOD = {"video": '"clip.mp4"', "question": '"What?"', "answer": '"red"'}


def _line(fields: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"


def record_files() -> list[bytes]:
    """Contents of JSONL files, each with one record that is none."""
    good = _line(GOOD)
    texts = [_line({**GOOD, name: value}) for name, values in NO_VALUES.items() for value in values]
    texts += [_line({key: value for key, value in GOOD.items() if key != name}) for name in GOOD]
    texts += ["{", "[]", "5", '"text"', "null", "{}", '{"video"}', "video: a.mp4", "NaN", "# a comment", "\x00"]
    texts += [good + good, good + ",", "[" + good + "]", good[:-1], good.replace('"', "'")]
    texts += ["[" * 100_000, '{"a":' * 100_000, '{"video": ' + "9" * 10_000 + "}"]
    files = [text.encode("utf-8", "surrogatepass") for text in texts]
    files += [good.encode("utf-16"), b"\x89PNG\r\n\x1a\n", good.encode() + b"\n" + good.encode()[:20]]
    return files


RECIPE = """\
model: {{variant: qtsplus-tiny}}
data: {{train_files: [{records}]}}
training: {{output_dir: {out}, max_steps: 1, use_cpu: true, report_to: none, save_strategy: no}}
"""


def recipe_files() -> list[bytes]:
    """Contents of recipes that are none."""
    texts = [
        *("", "# nothing", "5", "text", "[]", "- model", "null", "{", "model: [", "\t- x", "a: b: c", "*missing"),
        *("model: !!python/object/apply:os.system ['true']", "model: !foo {}", "!!python/object:qtsplus.X {}"),
        *("model: &a [*a]", "%YAML 9.9\n---\n{}", "---\na: 1\n---\nb: 2", "? [a]\n: b", "\x07", "[" * 5000),
        *("model: 5", "model: [variant]", "training: [x]", "models: {}", "5: {}", "null: {}", "{a: " * 5000),
        *("model: {variant: qtsplus-tiny}", "data: {train_files: [a]}", "training: {output_dir: a}"),
        "model: {variant: qtsplus-tiny}\nmodel: {variant: qtsplus-3b}",
        "model: {variant: qtsplus-tiny, variant: qtsplus-3b}",
        "model: {? [a, b] : c}",
    ]
    files = [b"\xff\xfe\x00\x01", b"\x89PNG\r\n\x1a\n", "model: {}".encode("utf-16"), b"a: \x80"]
    return [*(text.encode() for text in texts), *files]


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
training.max_steps: 0 | x | true
training.learning_rate: -1 | true | .nan
training.seed: 4294967296 | 1.5
training.num_train_epochs: .nan
training.per_device_train_batch_size: 0
training.gradient_accumulation_steps: 1.5
training.lr_scheduler_type: fastest | 5
training.lr_scheduler_kwargs: '{{'
training.optim: best | null
training.save_strategy: sometimes
training.eval_strategy: steps
training.report_to: nobody | {{}}
training.warmup_steps: x
training.weight_decay: -1
training.max_grad_norm: [1]
training.logging_steps: true
training.dataloader_num_workers: -1
training.lora_rank: 1.5
training.lora_dropout: 1
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
    *("", "=", "x", "model=1", ".variant=1", "model..n_max=1", "model.variant.x=1", "training.seed:1"),
    *("training.seed=[", "training.seed=!!python/name:os.system", "data.train_files.0=x", "МОДЕЛЬ.вариант=1"),
    "training.seed=\x00",
)


def override_lines() -> list[list[str]]:
    rows = [row.partition(": ") for row in OVERRIDES.strip().splitlines()]
    settings = [f"{name}={value}" for name, _, values in rows for value in values.split(" | ")]
    without_variant = ["train", "{recipe}", "--set", "model.variant=null"]
    return [
        *(["train", "{recipe}", "--set", setting] for setting in (*settings, *ODD_OVERRIDES)),
        *(
            [*without_variant, "--set", f"model.weights={folder}"]
            for folder in ("{wrong_types}", "{foreign}", "{missing}")
        ),
    ]


def train_lines() -> list[list[str]]:
    return [
        *(["train", path, *more] for path, more in product(("{missing}", "{frames}", "", "\x00"), ([], ["--dry-run"]))),
        ["train"],
        ["train", "{recipe}", "--sett", "a=1"],
        ["train", "{recipe}", "--resume=yes"],
        ["train", "{recipe}", "extra"],
    ]


def command_lines() -> list[list[str]]:
    """All of them but those that read a record file or a recipe of their own."""
    groups = (
        ask_lines,
        find_and_summarise_lines,
        watch_lines,
        batch_lines,
        serve_lines,
        app_lines,
        mcp_lines,
        eval_lines,
        convert_lines,
    )
    more = (publish_lines, data_lines, train_lines, override_lines)
    return thinned([line for group in (*groups, *more) for line in group()])
