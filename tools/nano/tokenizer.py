"""Makes nano's tokenizer: byte-level BPE trained on the generated corpus.

The result is a `tokenizer.json` and `tokenizer_config.json` pair that `AutoTokenizer`
loads as a fast tokenizer. Pre-tokenization is Qwen's (one token per digit); there is no
normalizer, so that any text comes back byte for byte.
"""

import json
import pathlib
import random
import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tools.nano.corpus import document

VOCAB_SIZE = 512
END_OF_TEXT = "<|endoftext|>"
TURN_END = "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, "<|im_start|>", TURN_END)
# As in Qwen3 these are single tokens but not "special": the cookbook's renderers encode
# message content with special tokens taken literally, and must still find these whole.
MARKUP_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

_NUM_DOCUMENTS = 20_000
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(seed: int, num_documents: int = _NUM_DOCUMENTS) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*CONTROL_TOKENS, *MARKUP_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = random.Random(f"tokenizer/{seed}")
    reserved = re.compile("|".join(map(re.escape, (*CONTROL_TOKENS, *MARKUP_TOKENS))))
    texts: list[str] = []
    for _ in range(num_documents):
        # Segments apart, as they are encoded; reserved tokens are not for merging.
        for text, _ in document(rng):
            texts += reserved.split(text)
    tokenizer.train_from_iterator(texts, trainer)
    return _with_plain_markup(tokenizer)


def _with_plain_markup(tokenizer: Tokenizer) -> Tokenizer:
    """The trainer makes every reserved token special; this undoes it for the markup."""
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in CONTROL_TOKENS
    return Tokenizer.from_str(json.dumps(state))


def save_tokenizer(tokenizer: Tokenizer, out: pathlib.Path, max_length: int) -> None:
    template = pathlib.Path(__file__).parent / "chat_template.jinja"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": template.read_text(encoding="utf-8").rstrip("\n"),
    }
    tokenizer.save(str(out / "tokenizer.json"))
    text = json.dumps(config, indent=2) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")
