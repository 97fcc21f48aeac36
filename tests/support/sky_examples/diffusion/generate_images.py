"""Draws an image for each prompt in a bucket. Pillow stands in for a diffusion model."""

import os
import tempfile

import sky
from sky.batch import utils
from sky.serve import serve_utils


@sky.batch.remote_function
def generate_images():
    import sys

    from PIL import Image

    assert "/.venv" in sys.prefix, sys.prefix
    for batch in sky.batch.load():
        images = [Image.new("RGB", (8, 8), (len(item["prompt"]), 0, 0)) for item in batch]
        sky.batch.save_results(
            [{"prompt": item["prompt"], "image": image} for item, image in zip(batch, images, strict=True)]
        )


def ensure_pool(pool_name, pool_yaml):
    if sky.stream_and_get(sky.jobs.pool_status([pool_name])):
        return
    task = sky.Task.from_yaml(pool_yaml)
    task.name = pool_name
    sky.stream_and_get(sky.jobs.pool_apply(task, pool_name=pool_name, mode=serve_utils.DEFAULT_UPDATE_MODE))


def main():
    bucket = os.environ["SKY_BATCH_BUCKET"]
    images_path, manifest_path = f"s3://{bucket}/generated_images/", f"s3://{bucket}/manifest.jsonl"
    ensure_pool("diffusion-pool", os.path.join(os.path.dirname(__file__), "pool.yaml"))
    sky.batch.Dataset(sky.batch.JsonReader(f"s3://{bucket}/prompts.jsonl")).map(
        generate_images,
        pool_name="diffusion-pool",
        batch_size=3,
        output=[sky.batch.ImageWriter(images_path), sky.batch.JsonWriter(manifest_path, column=["prompt"])],
        activate_env="source ~/.venv/bin/activate",
    )
    directory = tempfile.mkdtemp()
    for index, entry in enumerate(utils.load_jsonl_from_cloud(manifest_path)):
        local_path = os.path.join(directory, f"{index:08d}.png")
        utils.download_file_from_cloud(f"{images_path}{index:08d}.png", local_path)
        print(f"{entry['prompt']}: {os.path.getsize(local_path)} bytes")


if __name__ == "__main__":
    main()
