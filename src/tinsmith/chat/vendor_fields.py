"""The table of fields of other servers that this server does not implement, with their neutral values.

A neutral value does not change the answer: it is ignored and named. Any other value of these fields is refused with the
way to get the same effect, because ignoring it would change the answer in silence. `NO_EFFECT` fields never change an
answer, and `wish` ones ask for something that the answer does without. A field that is neither here nor in a
request's model is unknown and ignored, unless the server is strict.
"""

from __future__ import annotations

from typing import Annotated

from tinsmith.wire.fields import NO_EFFECT, ClosedBody, Ignored, advisory, neutral, refuse

_BEAMS = "completions are sampled, without beam search"
_SAMPLER = "this server's sampler has no such option"
_STRUCTURE = "send structured_outputs"
_LENGTH = "send max_tokens"


class VendorSamplingFields(ClosedBody):
    """Sampling parameters of vLLM, SGLang, llama.cpp, TGI and Ollama."""

    use_beam_search: Annotated[Ignored, neutral(False, reason=_BEAMS)] = None
    length_penalty: Annotated[Ignored, neutral(1, reason=_BEAMS)] = None
    early_stopping: Annotated[Ignored, neutral(False, reason=_BEAMS)] = None
    num_beams: Annotated[Ignored, neutral(1, reason=_BEAMS)] = None
    do_sample: Annotated[Ignored, neutral(True, reason="send temperature 0 for greedy decoding")] = None
    logits_processors: Annotated[Ignored, refuse(_SAMPLER)] = None
    custom_logit_processor: Annotated[Ignored, refuse(_SAMPLER)] = None
    thinking_token_budget: Annotated[Ignored, refuse("only chats know where reasoning begins")] = None
    guided_decoding_backend: Annotated[Ignored, NO_EFFECT] = None
    guided_whitespace_pattern: Annotated[Ignored, refuse("enforced JSON is on one line")] = None
    typical_p: Annotated[Ignored, neutral(0, 1, reason=_SAMPLER)] = None
    tfs_z: Annotated[Ignored, neutral(0, 1, reason=_SAMPLER)] = None
    top_a: Annotated[Ignored, neutral(0, reason=_SAMPLER)] = None
    top_n_sigma: Annotated[Ignored, neutral(-1, 0, reason=_SAMPLER)] = None
    mirostat: Annotated[Ignored, neutral(0, reason=_SAMPLER)] = None
    mirostat_mode: Annotated[Ignored, neutral(0, reason=_SAMPLER)] = None
    xtc_probability: Annotated[Ignored, neutral(0, reason=_SAMPLER)] = None
    dry_multiplier: Annotated[Ignored, neutral(0, reason=_SAMPLER)] = None
    dynatemp_range: Annotated[Ignored, neutral(0, reason=_SAMPLER)] = None
    smoothing_factor: Annotated[Ignored, neutral(0, reason=_SAMPLER)] = None
    epsilon_cutoff: Annotated[Ignored, neutral(0, reason=_SAMPLER)] = None
    eta_cutoff: Annotated[Ignored, neutral(0, reason=_SAMPLER)] = None
    no_repeat_ngram_size: Annotated[Ignored, neutral(0, reason=_SAMPLER)] = None
    regex: Annotated[Ignored, refuse("send structured_outputs.regex")] = None
    ebnf: Annotated[Ignored, refuse(_STRUCTURE)] = None
    json_schema: Annotated[Ignored, refuse("send structured_outputs.json")] = None
    grammar: Annotated[Ignored, refuse("send structured_outputs.grammar, in Lark's form")] = None
    format: Annotated[Ignored, refuse("send response_format")] = None
    stop_regex: Annotated[Ignored, refuse("send stop strings")] = None
    no_stop_trim: Annotated[Ignored, neutral(False, reason="send include_stop_str_in_output")] = None
    max_new_tokens: Annotated[Ignored, refuse(_LENGTH)] = None
    n_predict: Annotated[Ignored, refuse(_LENGTH)] = None
    min_new_tokens: Annotated[Ignored, neutral(0, reason="send min_tokens")] = None
    max_output_tokens: Annotated[Ignored, refuse(_LENGTH)] = None
    stop_sequences: Annotated[Ignored, refuse("send stop")] = None
    options: Annotated[Ignored, refuse("send its fields beside the others")] = None
    extra_body: Annotated[Ignored, refuse("send its fields beside the others")] = None


class VendorFields(VendorSamplingFields):
    """Fields of a chat or completion that are not about sampling."""

    cache_salt: Annotated[Ignored, NO_EFFECT] = None
    priority: Annotated[Ignored, NO_EFFECT] = None
    request_id: Annotated[Ignored, NO_EFFECT] = None
    kv_transfer_params: Annotated[Ignored, NO_EFFECT] = None
    store: Annotated[Ignored, NO_EFFECT] = None
    service_tier: Annotated[Ignored, NO_EFFECT] = None
    user: Annotated[Ignored, NO_EFFECT] = None
    metadata: Annotated[Ignored, NO_EFFECT] = None
    safety_identifier: Annotated[Ignored, NO_EFFECT] = None
    prompt_cache_key: Annotated[Ignored, NO_EFFECT] = None
    prompt_cache_retention: Annotated[Ignored, NO_EFFECT] = None
    prompt_embeds: Annotated[Ignored, refuse("send the prompt as text or as prompt_token_ids")] = None
    return_hidden_states: Annotated[Ignored, neutral(False, reason="hidden states are not returned")] = None
    lora_path: Annotated[Ignored, refuse("name the checkpoint in model")] = None


class VendorChatFields(VendorFields):
    """Fields of a chat."""

    system: Annotated[Ignored, refuse("put it into messages")] = None
    instructions: Annotated[Ignored, refuse("put them into messages")] = None
    prompt: Annotated[Ignored, refuse("send messages, or send it to /completions")] = None
    previous_response_id: Annotated[Ignored, refuse("only /responses continue an earlier response")] = None
    thinking: Annotated[Ignored, advisory("send chat_template_kwargs")] = None
    echo: Annotated[Ignored, neutral(False, reason="only /completions echo their prompt")] = None
    prediction: Annotated[Ignored, NO_EFFECT] = None
    moderation: Annotated[Ignored, advisory("this server does not moderate content; leave it out")] = None
    web_search_options: Annotated[Ignored, advisory("this server does not access the web; leave it out")] = None
    chat_template: Annotated[
        Ignored, refuse("the model's own template is used; render yours in the client and send prompt_token_ids")
    ] = None
    documents: Annotated[Ignored, refuse("put the documents into messages")] = None
    mm_processor_kwargs: Annotated[Ignored, refuse("images are processed as the model's directory says")] = None
    media_io_kwargs: Annotated[Ignored, refuse("images are processed as the model's directory says")] = None
    functions: Annotated[Ignored, refuse("an outdated field; send tools")] = None
    function_call: Annotated[Ignored, refuse("an outdated field; send tool_choice", unless="auto")] = None
    audio: Annotated[Ignored, refuse("this server's models generate only text")] = None
    modalities: Annotated[Ignored, refuse("this server's models generate only text", unless=["text"])] = None


class VendorMessageFields(ClosedBody):
    """Fields of a chat's message."""

    refusal: Annotated[Ignored, refuse("put the text into content")] = None
    audio: Annotated[Ignored, refuse("this server's models accept only text and images")] = None
    function_call: Annotated[Ignored, refuse("send tool_calls")] = None
    prefix: Annotated[Ignored, neutral(False, reason="send continue_final_message")] = None
    partial: Annotated[Ignored, neutral(False, reason="send continue_final_message")] = None


_CHAT = "send it to /v1/chat/completions"


class ChatOnlyFields(VendorFields):
    """Fields that /v1/chat/completions has, and the doors that inherit from this class do not."""

    n: Annotated[Ignored, neutral(1, reason=_CHAT)] = None
    seed: Annotated[Ignored, refuse(_CHAT)] = None
    stop: Annotated[Ignored, refuse(_CHAT)] = None
    frequency_penalty: Annotated[Ignored, neutral(0, reason=_CHAT)] = None
    presence_penalty: Annotated[Ignored, neutral(0, reason=_CHAT)] = None
    repetition_penalty: Annotated[Ignored, neutral(1, reason=_CHAT)] = None
    logit_bias: Annotated[Ignored, refuse(_CHAT)] = None
    logprobs: Annotated[Ignored, neutral(False, reason=_CHAT)] = None
    top_k: Annotated[Ignored, neutral(-1, 0, reason=_CHAT)] = None
    min_p: Annotated[Ignored, neutral(0, reason=_CHAT)] = None
    min_tokens: Annotated[Ignored, neutral(0, reason=_CHAT)] = None
    stop_token_ids: Annotated[Ignored, refuse(_CHAT)] = None
    ignore_eos: Annotated[Ignored, neutral(False, reason=_CHAT)] = None
    allowed_token_ids: Annotated[Ignored, refuse(_CHAT)] = None
    bad_words: Annotated[Ignored, refuse(_CHAT)] = None
    response_format: Annotated[Ignored, refuse("send the format of this API, or send it to /v1/chat/completions")] = (
        None
    )
    structured_outputs: Annotated[Ignored, refuse(_CHAT)] = None
    guided_json: Annotated[Ignored, refuse(_CHAT)] = None
    guided_regex: Annotated[Ignored, refuse(_CHAT)] = None
    guided_choice: Annotated[Ignored, refuse(_CHAT)] = None
    guided_grammar: Annotated[Ignored, refuse(_CHAT)] = None
    chat_template: Annotated[Ignored, refuse("the model's own template is used")] = None
    chat_template_kwargs: Annotated[Ignored, refuse(_CHAT)] = None
    reasoning_effort: Annotated[Ignored, refuse("send the effort of this API")] = None
    prompt_token_ids: Annotated[Ignored, refuse(_CHAT)] = None
    prompt_logprobs: Annotated[Ignored, refuse(_CHAT)] = None
    return_token_ids: Annotated[Ignored, neutral(False, reason=_CHAT)] = None
    truncate_prompt_tokens: Annotated[Ignored, refuse(_CHAT)] = None
    include_stop_str_in_output: Annotated[Ignored, neutral(False, reason=_CHAT)] = None
    skip_special_tokens: Annotated[Ignored, neutral(True, reason=_CHAT)] = None
    continue_final_message: Annotated[Ignored, neutral(False, reason=_CHAT)] = None
