"""Sets of records as files, for tests."""

import json


def write_records(path, records):
    """Writes .jsonl, or one array into .json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps(record.row(), ensure_ascii=False) for record in records]
    path.write_text(f"[{','.join(rows)}]" if path.suffix == ".json" else "".join(row + "\n" for row in rows))
