"""Bad command lines of `python -m benchmarks`, in the words of `tests/bad_command_lines.py`."""

from bad_command_lines import LONG, NO_COUNTS, NO_FRACTIONS, NO_NUMBERS, NO_RATES, SELECTIONS, each_value, wrong

NO_SEEDS = ("-1", "4294967296", "1.5", *NO_NUMBERS)


def ablation_lines() -> list[list[str]]:
    ablation = ["ablation", "{records}", "--model", "{model}", "--work", "{out}", "--out", "{out}"]
    return [
        *each_value(ablation, "--retention", NO_FRACTIONS),
        *each_value(ablation, "--n-max", NO_COUNTS),
        [*ablation, "--variant", "gumbel"],
        [*ablation, "--seed", "1"],
        [*ablation, "--base", "{model}"],
        *(
            ["ablation", path, "--model", "{model}", "--work", "{out}", "--out", "{out}"]
            for path in ("{missing}", "{empty_folder}", "{video}", "{empty}", LONG)
        ),
    ]


def synthesis_lines() -> list[list[str]]:
    server = ["--endpoint", "http://127.0.0.1:9/v1", "--teacher", "m"]
    addresses = (
        *("", "localhost:8000", "ftp://x/v1", "http://", "http://x:99999/v1", "http://x:0/v1", "http://x y/v1", LONG),
        *("http://[::1/v1", "http://user:word@x/v1", "http://x/v1?key=1", "http://\x00", "http://ü/v1"),
    )
    makers = {"vscq1": "{captions}", "vscq2": "{choices}", "vqa": "{choices}"}
    vscq1, vscq2, vqa = (["make", name, source, "--out", "{out}"] for name, source in makers.items())
    both, with_frames = [*vscq1, *server], [*vscq2, *server]
    return [
        *(["make", name, path, *both[3:]] for name in makers for path in ("{missing}", "{empty}", "{text}")),
        *each_value([*vscq1[:3], *server], "--out", ("", "{text}", "{text}/x", "\x00")),
        *each_value(both, "--concurrency", ("4097", *NO_COUNTS)),
        *wrong(both, "--limit"),
        *each_value(both, "--extra-body", ("", "3", "{{", "[" * 5000, "NaN")),
        *each_value([*vscq1, "--teacher", "m"], "--endpoint", addresses),
        *([*vqa, *some] for some in (server[2:], server[:2], [*server[:2], "--teacher="])),
        *([*both, *more] for more in (["--requests-per-minute", "5"], ["--frames", "2"], ["--media-root", "{frames}"])),
        *each_value(with_frames, "--frames", ("1000000000", *NO_COUNTS)),
        *each_value(with_frames, "--media-root", ("", "{missing}", "{text}")),
    ]


def world_lines() -> list[list[str]]:
    world = ["tinyworld", "--out", "{out}", "--size", "1"]
    return [
        *each_value(["tinyworld", "--out", "{out}"], "--size", NO_COUNTS),
        *each_value(world, "--split", ("dev", "", "Train", "train,test", "../train", "тест")),
        *each_value(world, "--seconds", ("0", "1", "129", "500", "-8", "1.5", "nan", "8,16", "", "abc", "9" * 30)),
        *each_value(world, "--max-objects", ("500", *NO_COUNTS)),
        *each_value(world, "--multiple-choice", ("-0.1", "1.1", "inf", "-inf", *NO_NUMBERS)),
        *each_value(world, "--workers", NO_COUNTS),
        *(["tinyworld", "--size", "1", "--out", out] for out in ("{video}", "/dev/null/x", "\x00")),
        *(
            [*world, "--crowd", "--frame-size", "84", f"--teacher-videos={folder}"]
            for folder in ("{missing}", "{video}", "{empty_folder}", "{frames}", "/dev/null/x", "\x00", "", LONG)
        ),
        ["bigworld"],
        ["tinyworld", "--out", "{out}"],
        *([*world, *more] for more in (("--seed", "1"), ("--crowd", "--max-objects", "23"))),
        *each_value(["haystack", "--out", "{out}"], "--count", NO_COUNTS),
        *each_value(["haystack", "--out", "{out}"], "--seconds", ("129", *NO_COUNTS)),
        *each_value(["haystack", "--out", "{out}"], "--length", NO_COUNTS),
        ["haystack"],
    ]


def speed_lines() -> list[list[str]]:
    lines: list[list[str]] = [["fast"]]
    for name in ("speed", "memory", "scaling"):
        speed = [name, "--shape", "tiny", "--out", "{out}"]
        lines += each_value([name, "--out", "{out}"], "--shape", ("", "99b", "CPU", "../3b", "3b,cpu", "тест"))
        lines += each_value(speed, "--repeats", ("0", "-1", "1.5", "nan", "abc", ""))
        lines += each_value(speed, "--device", ("toaster", "meta", "cuda:99", "", "🤖"))
    for name in ("speed", "memory"):
        speed = [name, "--shape", "tiny", "--out", "{out}"]
        lines += each_value(speed, "--retention", ("0", "-1", "1.1", "nan", "inf", "abc", ""))
        lines += each_value(speed, "--dtype", ("float8", "", "int8"))
    sizes = [["0", "5"], ["-1", "5"], ["5"], ["5", "5"], ["1.5", "2"], ["abc", "5"], ["nan", "5"]]
    lines += [
        ["scaling", "--shape", "tiny", "--out", "{out}", *(f"--size={value}" for value in pair)] for pair in sizes
    ]
    files = ("{missing}", "{records}", "{video}", "{empty}")
    return [*lines, *(["efficiency", path, "--out", "{out}"] for path in files), ["efficiency"]]


def learned_lines() -> list[list[str]]:
    learned = ["learned", "--out", "{out}", "--work", "{out}/work"]
    base, test, recipe = ["--base", "{model}"], ["--test", "{records}"], ["--recipe", "{recipe}"]
    wrong = [f"--seed={seed}" for seed in NO_SEEDS] + [f"--batch-size={size}" for size in ("0", "-1", "x", "1.5")]
    wrong += ["--variant=", "--variant=best", "--base={model}"]  # the last: two bases for three seeds
    return [
        ["learned"],
        *each_value([*learned, *test, *recipe], "--base", ("{missing}", "{empty_folder}", "{video}", "\x00")),
        *(
            [*learned, *base, *recipe, "--test", path]
            for path in ("{missing}", "{empty_folder}", "{video}", "{empty}", "")
        ),
        *([*learned, *base, *test, *recipe, one] for one in wrong),
        *([*learned, *base, *test, "--recipe", path] for path in ("{missing}", "{video}", "{records}", "{frames}")),
        *(["train", path] for path in ("{missing}", "{video}", "{records}")),
    ]


def stream_lines() -> list[list[str]]:
    return [
        *each_value(["stream", "--out", "{out}"], "--films", ("1", *NO_COUNTS)),
        *each_value(["stream", "--out", "{out}"], "--seconds", ("60", *NO_COUNTS)),
        *each_value(["stream", "--out", "{out}"], "--tokens", NO_COUNTS),
        ["stream", "--out", "{text}"],
        ["stream", "extra"],
    ]


def rehearsal_lines() -> list[list[str]]:
    rehearsal = ["rehearsal", "--shape", "tiny", "--out", "{out}"]
    return [
        rehearsal,
        *each_value(rehearsal, "--work", ("{video}", "{frames}", "{model}", "/dev/null/x", "\x00", "", LONG)),
        *each_value(["rehearsal", "--work", "{out}", "--out", "{out}"], "--shape", ("", "99b", "3B", "cpu", "тест")),
        *each_value(
            ["rehearsal", "--work", "{out}", "--out", "{out}"], "--vocabulary", ("{missing}", "{video}", "", LONG)
        ),
    ]


def study_lines() -> list[list[str]]:
    needle = ["needle", "--model", "{model}", "--out", "{out}"]
    hidden, background = ["--needles", "{records}"], ["--background", "{video}"]
    both = [*needle, *hidden, *background]
    return [
        *each_value(both, "--length", ("0", "-5", "nan", "inf", "1e12")),
        *each_value(both, "--depth", ("-0.1", "1.1", "nan")),
        *each_value(both, "--selection", SELECTIONS),
        *each_value(both, "--retention", NO_FRACTIONS),
        *each_value(both, "--max-visual-tokens", NO_COUNTS),
        *each_value(both, "--fps", NO_RATES),
        *each_value([*needle, *background], "--needles", ("{missing}", "{video}", "{empty}", "{empty_folder}", LONG)),
        *each_value([*needle, *hidden], "--background", ("", "{missing}", "{garbage}", "{empty_folder}")),
        [*both, "--retention", "0.5", "--max-visual-tokens", "3"],
        [*both, "--length", "5", "--length", "5"],
        [*both, "--selection", "uniform", "--selection", "uniform"],
        [*both, "--selection", "all", "--retention", "0.5"],
        *each_value(both, "--out", ("{records}", "{records}/in")),
        [*needle, *hidden],
        [*needle, *background],
        *(
            ["analysis", path, "--model", "{model}", "--work", "{out}", "--out", "{out}"]
            for path in ("", "{missing}", "{empty_folder}", "{video}", "{empty}", LONG)
        ),
    ]


def evaluate_lines() -> list[list[str]]:
    wrong = (
        ["--selection", "all", "--retention", "0.1"],
        ["--selection", "all", "--max-visual-tokens", "9"],
        ["--retention", "0.1", "--max-visual-tokens", "9"],
        ["--num-frames", "4", "--max-frames", "9"],
        ["--fps", "1", "--num-frames", "4"],
        ["--max-pixels", "-4"],
    )
    return [
        *(["report", path] for path in ("{missing}", "{empty_folder}", "{records}", LONG)),
        *(["evaluate", "--tasks", "lvbench", "--model", "{model}", *more] for more in wrong),
        ["evaluate"],
    ]


def laboratory_lines() -> list[list[str]]:
    lines = [
        *ablation_lines(),
        *synthesis_lines(),
        *world_lines(),
        *speed_lines(),
        *learned_lines(),
        *rehearsal_lines(),
    ]
    return [*lines, *stream_lines(), *study_lines(), *evaluate_lines()]
