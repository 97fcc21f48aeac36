"""The table of fields of other servers that this server does not implement, with their neutral values.

A neutral value does not change the answer: it is ignored and named. Any other value of these fields is refused with the
way to get the same effect, because ignoring it would change the answer in silence. `NO_EFFECT` fields never change an
answer, and `wish` ones ask for something that the answer does without. A field that is neither here nor in a
request's model is unknown and ignored, unless the server is strict.
"""

from __future__ import annotations

from typing import Annotated

from tinsmith.wire.fields import NO_EFFECT, ClosedBody, Unread, neutral, refused, wish

_BEAMS = "completions are sampled, without beam search"
_SAMPLER = "this server's sampler has no such option"
_STRUCTURE = "send structured_outputs"
_LENGTH = "send max_tokens"


class VendorSamplingFields(ClosedBody):
    """Sampling parameters of vLLM, SGLang, llama.cpp, TGI and Ollama."""

    use_beam_search: Annotated[Unread, neutral(False, reason=_BEAMS)] = None
    length_penalty: Annotated[Unread, neutral(1, reason=_BEAMS)] = None
    early_stopping: Annotated[Unread, neutral(False, reason=_BEAMS)] = None
    num_beams: Annotated[Unread, neutral(1, reason=_BEAMS)] = None
    do_sample: Annotated[Unread, neutral(True, reason="send temperature 0 for greedy decoding")] = None
    logits_processors: Annotated[Unread, refused(_SAMPLER)] = None
    custom_logit_processor: Annotated[Unread, refused(_SAMPLER)] = None
    thinking_token_budget: Annotated[Unread, refused("reasoning has no budget; send max_tokens")] = None
    guided_decoding_backend: Annotated[Unread, NO_EFFECT] = None
    guided_whitespace_pattern: Annotated[Unread, refused("enforced JSON is on one line")] = None
    typical_p: Annotated[Unread, neutral(0, 1, reason=_SAMPLER)] = None
    tfs_z: Annotated[Unread, neutral(0, 1, reason=_SAMPLER)] = None
    top_a: Annotated[Unread, neutral(0, reason=_SAMPLER)] = None
    top_n_sigma: Annotated[Unread, neutral(-1, 0, reason=_SAMPLER)] = None
    mirostat: Annotated[Unread, neutral(0, reason=_SAMPLER)] = None
    mirostat_mode: Annotated[Unread, neutral(0, reason=_SAMPLER)] = None
    xtc_probability: Annotated[Unread, neutral(0, reason=_SAMPLER)] = None
    dry_multiplier: Annotated[Unread, neutral(0, reason=_SAMPLER)] = None
    dynatemp_range: Annotated[Unread, neutral(0, reason=_SAMPLER)] = None
    smoothing_factor: Annotated[Unread, neutral(0, reason=_SAMPLER)] = None
    epsilon_cutoff: Annotated[Unread, neutral(0, reason=_SAMPLER)] = None
    eta_cutoff: Annotated[Unread, neutral(0, reason=_SAMPLER)] = None
    no_repeat_ngram_size: Annotated[Unread, neutral(0, reason=_SAMPLER)] = None
    regex: Annotated[Unread, refused("send structured_outputs.regex")] = None
    ebnf: Annotated[Unread, refused(_STRUCTURE)] = None
    json_schema: Annotated[Unread, refused("send structured_outputs.json")] = None
    grammar: Annotated[Unread, refused("send structured_outputs.grammar, in Lark's form")] = None
    format: Annotated[Unread, refused("send response_format")] = None
    stop_regex: Annotated[Unread, refused("send stop strings")] = None
    no_stop_trim: Annotated[Unread, neutral(False, reason="send include_stop_str_in_output")] = None
    max_new_tokens: Annotated[Unread, refused(_LENGTH)] = None
    n_predict: Annotated[Unread, refused(_LENGTH)] = None
    min_new_tokens: Annotated[Unread, neutral(0, reason="send min_tokens")] = None
    max_output_tokens: Annotated[Unread, refused(_LENGTH)] = None
    stop_sequences: Annotated[Unread, refused("send stop")] = None
    options: Annotated[Unread, refused("send its fields beside the others")] = None
    extra_body: Annotated[Unread, refused("send its fields beside the others")] = None


class VendorFields(VendorSamplingFields):
    """Fields of a chat or completion that are not about sampling."""

    cache_salt: Annotated[Unread, NO_EFFECT] = None
    priority: Annotated[Unread, NO_EFFECT] = None
    request_id: Annotated[Unread, NO_EFFECT] = None
    kv_transfer_params: Annotated[Unread, NO_EFFECT] = None
    store: Annotated[Unread, NO_EFFECT] = None
    service_tier: Annotated[Unread, NO_EFFECT] = None
    user: Annotated[Unread, NO_EFFECT] = None
    metadata: Annotated[Unread, NO_EFFECT] = None
    safety_identifier: Annotated[Unread, NO_EFFECT] = None
    prompt_cache_key: Annotated[Unread, NO_EFFECT] = None
    prompt_cache_retention: Annotated[Unread, NO_EFFECT] = None
    prompt_embeds: Annotated[Unread, refused("send the prompt as text or as prompt_token_ids")] = None
    return_hidden_states: Annotated[Unread, neutral(False, reason="hidden states are not returned")] = None
    lora_path: Annotated[Unread, refused("name the checkpoint in model")] = None


class VendorChatFields(VendorFields):
    """Fields of a chat."""

    system: Annotated[Unread, refused("put it into messages")] = None
    instructions: Annotated[Unread, refused("put them into messages")] = None
    prompt: Annotated[Unread, refused("send messages, or send it to /completions")] = None
    previous_response_id: Annotated[Unread, refused("only /responses continue an earlier response")] = None
    thinking: Annotated[Unread, wish("send chat_template_kwargs")] = None
    echo: Annotated[Unread, neutral(False, reason="only /completions echo their prompt")] = None
    prediction: Annotated[Unread, NO_EFFECT] = None
    moderation: Annotated[Unread, wish("this server does not moderate content; leave it out")] = None
    web_search_options: Annotated[Unread, wish("this server does not access the web; leave it out")] = None
    chat_template: Annotated[
        Unread, refused("the model's own template is used; render yours in the client and send prompt_token_ids")
    ] = None
    documents: Annotated[Unread, refused("put the documents into messages")] = None
    enable_thinking: Annotated[Unread, refused("send chat_template_kwargs.enable_thinking")] = None
    mm_processor_kwargs: Annotated[Unread, refused("images are processed as the model's directory says")] = None
    media_io_kwargs: Annotated[Unread, refused("images are processed as the model's directory says")] = None
    functions: Annotated[Unread, refused("an outdated field; send tools")] = None
    function_call: Annotated[Unread, refused("an outdated field; send tool_choice", unless="auto")] = None
    audio: Annotated[Unread, refused("this server's models generate only text")] = None
    modalities: Annotated[Unread, refused("this server's models generate only text", unless=["text"])] = None


class VendorMessageFields(ClosedBody):
    """Fields of a chat's message."""

    refusal: Annotated[Unread, refused("put the text into content")] = None
    audio: Annotated[Unread, refused("this server's models accept only text and images")] = None
    function_call: Annotated[Unread, refused("send tool_calls")] = None
    prefix: Annotated[Unread, neutral(False, reason="send continue_final_message")] = None
    partial: Annotated[Unread, neutral(False, reason="send continue_final_message")] = None


_CHAT = "send it to /v1/chat/completions"


class ChatOnlyFields(VendorFields):
    """Fields that /v1/chat/completions has, and the doors that inherit from this class do not."""

    n: Annotated[Unread, neutral(1, reason=_CHAT)] = None
    seed: Annotated[Unread, refused(_CHAT)] = None
    stop: Annotated[Unread, refused(_CHAT)] = None
    frequency_penalty: Annotated[Unread, neutral(0, reason=_CHAT)] = None
    presence_penalty: Annotated[Unread, neutral(0, reason=_CHAT)] = None
    repetition_penalty: Annotated[Unread, neutral(1, reason=_CHAT)] = None
    logit_bias: Annotated[Unread, refused(_CHAT)] = None
    logprobs: Annotated[Unread, neutral(False, reason=_CHAT)] = None
    top_k: Annotated[Unread, neutral(-1, 0, reason=_CHAT)] = None
    min_p: Annotated[Unread, neutral(0, reason=_CHAT)] = None
    min_tokens: Annotated[Unread, neutral(0, reason=_CHAT)] = None
    stop_token_ids: Annotated[Unread, refused(_CHAT)] = None
    ignore_eos: Annotated[Unread, neutral(False, reason=_CHAT)] = None
    allowed_token_ids: Annotated[Unread, refused(_CHAT)] = None
    bad_words: Annotated[Unread, refused(_CHAT)] = None
    response_format: Annotated[Unread, refused("send the format of this API, or send it to /v1/chat/completions")] = (
        None
    )
    structured_outputs: Annotated[Unread, refused(_CHAT)] = None
    guided_json: Annotated[Unread, refused(_CHAT)] = None
    guided_regex: Annotated[Unread, refused(_CHAT)] = None
    guided_choice: Annotated[Unread, refused(_CHAT)] = None
    guided_grammar: Annotated[Unread, refused(_CHAT)] = None
    chat_template: Annotated[Unread, refused("the model's own template is used")] = None
    chat_template_kwargs: Annotated[Unread, refused(_CHAT)] = None
    reasoning_effort: Annotated[Unread, refused("send the effort of this API")] = None
    prompt_token_ids: Annotated[Unread, refused(_CHAT)] = None
    prompt_logprobs: Annotated[Unread, refused(_CHAT)] = None
    return_token_ids: Annotated[Unread, neutral(False, reason=_CHAT)] = None
    truncate_prompt_tokens: Annotated[Unread, refused(_CHAT)] = None
    include_stop_str_in_output: Annotated[Unread, neutral(False, reason=_CHAT)] = None
    skip_special_tokens: Annotated[Unread, neutral(True, reason=_CHAT)] = None
    continue_final_message: Annotated[Unread, neutral(False, reason=_CHAT)] = None
