"""Tables of results, as Markdown."""

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """The lines of a Markdown table, with so many columns of `texts` on the left; the others hold numbers."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in [header, *rows]]
    head, *body = ["| " + " | ".join(row) + " |" for row in cells]
    return [head, "|" + "---|" * texts + "---:|" * (len(header) - texts), *body]
