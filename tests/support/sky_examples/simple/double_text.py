"""Doubles the texts of a file of JSON lines in a bucket."""

import os

import sky
from sky.batch import utils
from sky.serve import serve_utils


@sky.batch.remote_function
def double_text():
    for batch in sky.batch.load():
        print(f"a batch of {len(batch)}")
        sky.batch.save_results([{"text": item["text"], "output": item["text"] * 2} for item in batch])


def ensure_pool(pool_name, pool_yaml):
    if sky.stream_and_get(sky.jobs.pool_status([pool_name])):
        print(f"the pool {pool_name} exists")
        return
    task = sky.Task.from_yaml(pool_yaml)
    task.name = pool_name
    request = sky.jobs.pool_apply(task, pool_name=pool_name, mode=serve_utils.DEFAULT_UPDATE_MODE)
    sky.stream_and_get(request)


def main():
    bucket = os.environ["SKY_BATCH_BUCKET"]
    ensure_pool("test-batch-pool", os.path.join(os.path.dirname(__file__), "pool.yaml"))
    dataset = sky.dataset(sky.batch.JsonReader(f"s3://{bucket}/test.jsonl"))
    output_path = f"s3://{bucket}/output.jsonl"
    dataset.map(double_text, pool_name="test-batch-pool", batch_size=2, output=sky.batch.JsonWriter(output_path))
    for number, result in enumerate(utils.load_jsonl_from_cloud(output_path), 1):
        print(f"{number}. {result['output']}")


if __name__ == "__main__":
    main()
