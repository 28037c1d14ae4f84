"""Sets of records as files, for tests."""

import json


def write_records(path, records):
    """Writes one JSON object a line, or one array of them into a `.json` file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [record.row() for record in records]
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, ensure_ascii=False))
        return
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
