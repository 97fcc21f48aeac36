"""A custom reader and writer: their source is sent with the job, and only workers run it.

tinsmith serve                            # in another terminal
python examples/batch/custom_formats.py OUTPUT_DIRECTORY
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from tinsmith import batch

directory = Path(sys.argv[1] if len(sys.argv) > 1 else "custom_formats")


@batch.INPUT_READER_REGISTRY.type_register(name="primes")
@dataclass
class PrimesReader(batch.InputReader):
    """The prime numbers below a limit. Rows that are made need no place: any `path` will do."""

    below: int = 100

    def __len__(self):
        return len(self._primes())

    def download_batch(self, start_idx, end_idx, cache_dir):
        return [{"prime": prime} for prime in self._primes()[start_idx : end_idx + 1]]

    def _primes(self):
        return [n for n in range(2, self.below) if all(n % divisor for divisor in range(2, int(n**0.5) + 1))]


@batch.OUTPUT_WRITER_REGISTRY.type_register(name="markdown_table")
@dataclass
class MarkdownTableWriter(batch.OutputWriter):
    """One file of all rows. The three methods work below `path`, which is a staging place until all is there."""

    columns: list[str] | None = None

    def upload_batch(self, results, start_idx, end_idx, job_id):
        from pathlib import Path

        part = Path(f"{self.path}.parts") / f"{start_idx:08d}"
        part.parent.mkdir(exist_ok=True)
        part.write_text("".join("| " + " | ".join(str(row[c]) for c in self.columns) + " |\n" for row in results))

    def reduce_results(self, job_id):
        from pathlib import Path

        head = "| " + " | ".join(self.columns) + " |\n" + "|---" * len(self.columns) + "|\n"
        parts = sorted(Path(f"{self.path}.parts").glob("*"))
        Path(self.path).write_text(head + "".join(part.read_text() for part in parts))

    def cleanup(self, job_id):
        import shutil

        shutil.rmtree(f"{self.path}.parts", ignore_errors=True)


def remainders(row):
    return {"by_4": row["prime"] % 4, "by_6": row["prime"] % 6}


job = batch.Dataset(PrimesReader(path="primes", below=200)).map(
    remainders,
    batch_size=8,
    output=MarkdownTableWriter(str(directory / "primes.md"), columns=["prime", "by_4", "by_6"]),
    if_exists="overwrite",
)
print(f"{job.outputs[0].rows} rows in {job.outputs[0].path}")
