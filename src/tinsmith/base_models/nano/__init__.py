"""The embedded base model `tinsmith/nano`: a small pretrained decoder in the package.

`path()` is a directory in the Hugging Face layout: the weights, the tokenizer and the
chat template. `python -m tinsmith.base_models.nano.train` makes it again. Importing this module
loads nothing heavy; the recipe's modules beside it do.
"""

import pathlib

MODEL_NAME = "tinsmith/nano"


def path() -> pathlib.Path:
    """The directory to give to `from_pretrained`."""
    return pathlib.Path(__file__).parent / "model"
