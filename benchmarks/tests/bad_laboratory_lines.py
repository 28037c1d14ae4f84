"""Bad command lines of `python -m benchmarks`, in the words of `tests/bad_command_lines.py`."""

from bad_command_lines import LONG, each_value


def speed_lines() -> list[list[str]]:
    lines: list[list[str]] = [["fast"], ["efficiency"], ["efficiency", "{missing}", "--out", "{out}"]]
    for name in ("speed", "memory", "scaling"):
        speed = [name, "--shape", "tiny", "--out", "{out}"]
        lines += each_value([name, "--out", "{out}"], "--shape", ("", "99b", "../3b"))
        lines += each_value(speed, "--repeats", ("0", "1.5", ""))
        lines += each_value(speed, "--device", ("toaster", "cuda:99", ""))
    lines += each_value(["speed", "--shape", "tiny", "--out", "{out}"], "--retention", ("0", "1.1", "nan", ""))
    lines += each_value(["memory", "--shape", "tiny", "--out", "{out}"], "--dtype", ("float8", ""))
    for sizes in (["0", "5"], ["5"], ["5", "5"], ["abc", "5"]):
        lines.append(["scaling", "--shape", "tiny", "--out", "{out}", *(f"--size={value}" for value in sizes)])
    return lines


def rehearsal_lines() -> list[list[str]]:
    rehearsal = ["rehearsal", "--out", "{out}"]
    return [
        [*rehearsal, "--shape", "tiny"],
        *each_value([*rehearsal, "--shape", "tiny"], "--work", ("{video}", "/dev/null/x", "", LONG)),
        *each_value([*rehearsal, "--work", "{out}"], "--shape", ("", "99b")),
        *each_value([*rehearsal, "--work", "{out}"], "--vocabulary", ("{missing}", "{video}")),
    ]


def evaluate_lines() -> list[list[str]]:
    contradictions = (
        ["--selection", "all", "--retention", "0.1"],
        ["--retention", "0.1", "--max-visual-tokens", "9"],
        ["--num-frames", "4", "--max-frames", "9"],
        ["--fps", "1", "--num-frames", "4"],
        ["--max-pixels", "-4"],
    )
    lines = [
        ["evaluate"],
        *(["evaluate", "--tasks", "lvbench", "--model", "{model}", *more] for more in contradictions),
    ]
    for path in ("{missing}", "{video}"):
        lines.append(["train", path])
        lines.append(["report", path])
        lines.append(["analysis", path, "--model", "{model}", "--work", "{out}", "--out", "{out}"])
    return lines


def laboratory_lines() -> list[list[str]]:
    return [*speed_lines(), *rehearsal_lines(), *evaluate_lines()]
