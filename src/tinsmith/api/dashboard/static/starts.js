// The lines that make a first run, session or bulk job, which a page without any shows.

const server = () => `export TINKER_BASE_URL=${location.origin} TINKER_API_KEY=...`;

export const firstRun = () => `${server()}\npython first.py   # of the README; or any loop of the tinker SDK`;

export const firstJob = (model) => `${server()}
python - <<'END'
from tinsmith import batch

rows = [{"text": "Say hello."}, {"text": "Say yes."}]
sample = batch.Sample(model="${model}", prompt="text", max_tokens=16)
batch.from_items(rows).map(sample, output=batch.JsonWriter("answers.jsonl"))
END`;
