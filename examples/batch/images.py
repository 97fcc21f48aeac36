"""Several outputs of one pass: images, one file for each row, and a manifest of what was drawn.

The images are drawn by a formula; a diffusion model would be loaded where the palette is made, once on each worker.

    tinsmith serve                            # in another terminal
    python examples/batch/images.py OUTPUT_DIRECTORY
"""

import sys
from pathlib import Path

from tinsmith import batch

directory = Path(sys.argv[1] if len(sys.argv) > 1 else "images")
PROMPTS = ["a quiet sea", "red sand at noon", "moss", "the inside of a cloud", "embers", "first snow"]


@batch.remote_function
def draw(size: int) -> None:
    import hashlib

    import numpy as np

    height, width = np.mgrid[0:size, 0:size] / size
    for rows in batch.load():
        results = []
        for row in rows:
            seed = hashlib.sha256(row["prompt"].encode()).digest()
            waves = [np.sin(6.28 * (seed[c] % 5 * width + seed[c + 3] % 5 * height) + seed[c + 6]) for c in range(3)]
            pixels = (np.stack(waves, axis=-1) * 100 + 128).astype(np.uint8)
            results.append({"prompt": row["prompt"], "brightness": float(pixels.mean()), "image": pixels})
        batch.save_results(results)


job = batch.from_items([{"prompt": prompt} for prompt in PROMPTS]).map(
    draw,
    fn_kwargs={"size": 64},
    batch_size=2,
    output=[
        batch.ImageWriter(str(directory / "png")),
        batch.JsonWriter(str(directory / "manifest.jsonl"), column=["prompt", "brightness"]),
    ],
    if_exists="overwrite",
)
for output in job.outputs:
    print(f"{output.rows} rows in {output.path}")
