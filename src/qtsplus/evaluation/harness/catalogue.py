"""The paper's benchmarks by their names in lmms-eval."""

# Of lmms-eval 0.7.3. TempCompass is the paper's part with options; its captions need another model as a judge.
PAPER = (
    "tempcompass_multi_choice",
    "videomme",
    "videomme_w_subtitle",
    "videomme_long",
    "video_mmmu",
    "lvbench",
    "mlvu_dev",
    "mlvu_test",
    "mvbench",
    "longvideobench_val_v",
)

# Metrics that are given as a share; the others of these benchmarks are percentages. Reports speak of percentages.
SHARES = frozenset({"exact_match", "lvb_acc", "lvbench_score", "mmmu_acc"})


def resolve(tasks: str) -> list[str]:
    """
    The tasks of a list with commas, each once; `paper` stands for all of the paper's.

    Raises:
        ValueError: no name between two commas.
    """
    names = [name.strip() for name in tasks.split(",")]
    if not all(names):
        raise ValueError(f"--tasks is {tasks!r}; expected names with commas between them, such as videomme,lvbench.")
    return list(dict.fromkeys(task for name in names for task in (PAPER if name == "paper" else (name,))))
