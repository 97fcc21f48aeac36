"""A function over every row of a file, on the workers of a server.

tinsmith serve                            # in another terminal
python examples/batch/simple.py OUTPUT_DIRECTORY
"""

import json
import sys
from pathlib import Path

from tinsmith import batch

directory = Path(sys.argv[1] if len(sys.argv) > 1 else "simple")
directory.mkdir(parents=True, exist_ok=True)
source = directory / "words.jsonl"
source.write_text("".join(json.dumps({"text": f"word {index}"}) + "\n" for index in range(100)))


@batch.remote_function
def count_letters(letter: str) -> None:
    """Runs once per worker, so code above the loop runs once."""
    from collections import Counter

    for rows in batch.load():
        batch.save_results([{**row, "count": Counter(row["text"])[letter]} for row in rows])


job = batch.read_json(str(source)).map(
    count_letters,
    fn_kwargs={"letter": "1"},
    batch_size=10,
    output=batch.JsonWriter(str(directory / "counts.jsonl")),
    if_exists="overwrite",
)
for output in job.outputs:
    print(f"{output.rows} rows in {output.path}")
