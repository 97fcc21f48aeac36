"""The JSON body of each path, as a JSON schema: what the OpenAPI document says of requests.

A table to be read, by people and by generated clients. Requests are judged by `wire` and `admission`, which say
more than a schema can; what a schema here refuses, they refuse, too. An optional field may be null, which means the
same as leaving it out.
"""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith.api.admission import MAX_NUM_SAMPLES, MAX_RANK, MAX_STOP_LENGTH, MAX_STOPS, MAX_TTL_S, MIN_RANK, MIN_TTL_S
from tinsmith.api.operation import ANTHROPIC, OPENAI
from tinsmith.batch.openai import ENDPOINTS, WINDOW
from tinsmith.store.sessions import FINISH_TYPES
from tinsmith.wire.fields import MAX_TEXT
from tinsmith.wire.weights import MAX_RECIPIENTS, OPTIMIZERS

Schema = dict[str, object]

TEXT: Schema = {"type": "string", "maxLength": MAX_TEXT}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
ANYTHING: Schema = {"type": "object"}
NUMBERS: Schema = {"type": "array", "items": NUMBER}
INTEGERS: Schema = {"type": "array", "items": {"type": "integer"}}


def listed(items: Schema, most: int) -> Schema:
    return {"type": "array", "items": items, "maxItems": most}


def one_of(*words: str | int) -> Schema:
    return {"enum": list(words)}


def integer(low: int, high: int = 2**31 - 1) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def fields(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    known = dict(required) | {name: {"anyOf": [schema, {"type": "null"}]} for name, schema in (optional or {}).items()}
    return {"type": "object", "required": list(required), "properties": known}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


POSITION = integer(0)
TRAINING_SEQ_ID = integer(1, 2**62)
TTL = integer(MIN_TTL_S, MAX_TTL_S)
METADATA: Schema = {"type": "object", "description": "at most 64 KiB of JSON"}
TEXT_METADATA: Schema = METADATA | {"additionalProperties": {"type": "string"}}

# Parts that several bodies share, by the SDK's names for them.
SHARED: Mapping[str, Schema] = {
    "EncodedTextChunk": fields({"tokens": {"type": "array", "items": POSITION}}, {"type": one_of("encoded_text")}),
    "ModelInput": fields({"chunks": {"type": "array", "items": ref("EncodedTextChunk")}}),
    "TensorData": fields(
        {"data": NUMBERS, "dtype": one_of("int64", "float32")},
        {"shape": INTEGERS, "sparse_crow_indices": INTEGERS, "sparse_col_indices": INTEGERS},
    ),
    "Datum": fields(
        {
            "model_input": ref("ModelInput"),
            "loss_fn_inputs": {"type": "object", "additionalProperties": ref("TensorData")},
        }
    ),
    "SamplingParams": fields(
        {},
        {
            "max_tokens": integer(1),
            "seed": {"type": "integer"},
            "stop": {
                "anyOf": [
                    {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
                    listed({"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}, MAX_STOPS),
                    listed(POSITION, MAX_STOPS),
                ]
            },
            "temperature": {"type": "number", "minimum": 0},
            "top_k": integer(-1),
            "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        },
    ),
    "LoraConfig": fields(
        {},
        {
            "rank": integer(MIN_RANK, MAX_RANK),
            "seed": {"type": "integer"},
            "train_unembed": FLAG,
            "train_mlp": FLAG,
            "train_attn": FLAG,
        },
    ),
    "OptimizerConfig": fields({"type": one_of(*OPTIMIZERS)}, {"version": integer(1, 1)}),
    "AdamParams": fields(
        {},
        dict.fromkeys(("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"), NUMBER),
    ),
    "OptimParams": fields(
        {"type": one_of(*OPTIMIZERS)},
        dict.fromkeys(("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"), NUMBER),
    ),
    "CustomLossInput": fields({"name": TEXT, "rank": integer(0, 2)}),
    "CustomLossNode": fields(
        {
            "op": one_of("placeholder", "get_attr", "call_function", "call_method", "call_module", "output"),
            "name": TEXT,
            "target": TEXT,
        },
    )
    | {"description": "args (a list) and kwargs (an object) hold encoded values; docs/losses.md says which"},
    "CustomLossGraph": fields({"nodes": {"type": "array", "items": ref("CustomLossNode")}}, {"format": one_of(1)}),
}

SAVE: Mapping[str, Schema] = {"seq_id": TRAINING_SEQ_ID, "ttl_seconds": TTL}
PASS: Mapping[str, Schema] = {
    "data": {"type": "array", "items": ref("Datum")},
    "loss_fn": TEXT,
    "loss_fn_config": {"type": "object", "additionalProperties": {"type": ["number", "string"]}},
}
# The older dialect's passes; the SDK's are protobuf.
JSON_PASS = fields(
    {"model_id": TEXT},
    {"seq_id": TRAINING_SEQ_ID, **PASS, "forward_backward_input": fields(PASS), "forward_input": fields(PASS)},
)
SEARCH_OWNER = fields({}, {"type": one_of("own", "accessible", "user"), "owner_urns": listed(TEXT, 10)})
STATUS_QUERY = fields(
    {"type": one_of("active", "cancelled", "failed", "client_finished")},
    {"reasons": listed(one_of(*FINISH_TYPES), 16)},
)

TEXTS: Schema = {"type": "array", "items": {"type": "string"}}
# What these clients send and this server honours; docs/openai.md says what it makes of it.
GENERATION: Mapping[str, Schema] = {
    "max_tokens": integer(0),
    "temperature": {"type": "number", "minimum": 0},
    "top_p": NUMBER,
    "top_k": integer(-1),
    "stream": FLAG,
}
OPENAI_GENERATION: Mapping[str, Schema] = {
    **GENERATION,
    "n": integer(1, 128),
    "seed": {"type": "integer"},
    "stop": {"anyOf": [{"type": "string"}, TEXTS]},
    "frequency_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "min_p": NUMBER,
    "logit_bias": {"type": "object", "additionalProperties": NUMBER},
    "response_format": ANYTHING,
    "stream_options": ANYTHING,
}
MESSAGES = {"type": "array", "items": ANYTHING, "minItems": 1}
CHAT = fields(
    {"model": TEXT, "messages": MESSAGES},
    {
        **OPENAI_GENERATION,
        "max_completion_tokens": integer(1),
        "logprobs": FLAG,
        "top_logprobs": integer(0, 20),
        "tools": {"type": "array", "items": ANYTHING},
        "tool_choice": {"type": ["string", "object"]},
        "parallel_tool_calls": FLAG,
    },
)
COMPLETION = fields(
    {"model": TEXT, "prompt": {"type": ["string", "array"]}},
    {**OPENAI_GENERATION, "logprobs": integer(0, 20), "echo": FLAG},
)
COUNTED: Mapping[str, Schema] = {
    "system": {"type": ["string", "array"]},
    "tools": {"type": "array", "items": ANYTHING},
    "tool_choice": ANYTHING,
}
MESSAGE = fields(
    {"model": TEXT, "messages": MESSAGES, "max_tokens": integer(1)},
    {**COUNTED, **GENERATION, "stop_sequences": TEXTS},
)
CHATS: Mapping[str, Schema] = {
    **{prefix + "/chat/completions": CHAT for prefix in OPENAI},
    **{prefix + "/completions": COMPLETION for prefix in OPENAI},
    **{prefix + "/embeddings": ANYTHING for prefix in OPENAI},
    **{prefix + "/messages": MESSAGE for prefix in ANTHROPIC},
    **{
        prefix + "/messages/count_tokens": fields({"model": TEXT, "messages": MESSAGES}, COUNTED)
        for prefix in ANTHROPIC
    },
}

KEPT = fields({"anchor": one_of("created_at"), "seconds": integer(3600, 30 * 86400)})
UPLOAD = fields(
    {"file": {"type": "string", "format": "binary"}, "purpose": one_of("batch")},
    {"expires_after[anchor]": one_of("created_at"), "expires_after[seconds]": integer(3600, 30 * 86400)},
)
UPLOADED_ADAPTER = fields(
    {
        "adapter_config.json": {"type": "string", "format": "binary"},
        "adapter_model.safetensors": {"type": "string", "format": "binary"},
        "base_model": TEXT,
        "name": TEXT,
    },
    {
        "optimizer.safetensors": {"type": "string", "format": "binary"},
        "project_id": {"type": "string", "maxLength": 128},
        "ttl_seconds": TTL,
        "user_metadata": {"type": "string"},
    },
)
BATCH = fields(
    {"input_file_id": TEXT, "endpoint": one_of(*ENDPOINTS), "completion_window": one_of(WINDOW)},
    {
        "metadata": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 512}},
        "output_expires_after": KEPT,
    },
)

REQUESTS: Mapping[str, Schema] = {
    **{prefix + "/files": UPLOAD for prefix in OPENAI},
    **{prefix + "/batches": BATCH for prefix in OPENAI},
    **CHATS,
    "/upload_weights": UPLOADED_ADAPTER,
    "/retrieve_future": fields({"request_id": TEXT}, {"allow_metadata_only": FLAG}),
    "/retrieve_futures": fields(
        {
            "target": fields(
                {"sampling_session_id": TEXT}, {"type": one_of("sampling_session"), "cloned_sampler_id": POSITION}
            )
        },
        {
            "prev_cursor": integer(0, 2**63 - 1),
            "timeout": {"type": "number", "minimum": 0},
            "retrieved_request_ids": {"type": "array", "items": TEXT},
        },
    ),
    "/cancel_future": fields({"request_id": TEXT}),
    "/asample": fields(
        {"prompt": ref("ModelInput"), "sampling_session_id": TEXT, "seq_id": integer(0, 2**62)},
        {
            "sampling_params": ref("SamplingParams"),
            "num_samples": integer(1, MAX_NUM_SAMPLES),
            "prompt_logprobs": FLAG,
            "topk_prompt_logprobs": POSITION,
            "topk_sample_logprobs": POSITION,
            "target_prompt_logprobs": ref("TensorData"),
            "prompt_alt_tokens_k": POSITION,
            "prompt_logprobs_last_n": integer(1),
            "record_stability_info": FLAG,
        },
    ),
    "/create_sampling_session": fields(
        {"session_id": TEXT, "sampling_session_seq_id": POSITION}, {"base_model": TEXT, "model_path": TEXT}
    ),
    "/join_sampling_session": fields({"sampling_session_id": TEXT}),
    "/forward_backward": JSON_PASS,
    "/forward": JSON_PASS,
    "/optim_step": fields(
        {"model_id": TEXT},
        {"adam_params": ref("AdamParams"), "optimizer_params": ref("OptimParams"), "seq_id": TRAINING_SEQ_ID},
    ),
    "/save_weights": fields(
        {"model_id": TEXT}, {"path": TEXT, **SAVE, "overwrite": FLAG, "user_metadata": TEXT_METADATA}
    ),
    "/save_weights_for_sampler": fields(
        {"model_id": TEXT},
        {
            "path": TEXT,
            **SAVE,
            "sampling_session_seq_id": POSITION,
            "kind": one_of("snapshot", "inflight"),
            "user_metadata": TEXT_METADATA,
        },
    ),
    "/save_weights_external": fields(
        {"model_id": TEXT, "path": TEXT}, {**SAVE, "age_encryption_recipients": listed(TEXT, MAX_RECIPIENTS)}
    ),
    "/create_session": fields(
        {},
        {
            "tags": listed(TEXT, 100),
            "user_metadata": METADATA,
            "sdk_version": {"type": "string", "maxLength": 64},
            "project_id": {"type": "string", "maxLength": 128},
            "display_name": TEXT,
        },
    ),
    "/session_heartbeat": fields({"session_id": TEXT}),
    "/sessions/search": fields(
        {},
        {
            "session_id": TEXT,
            "project_ids": listed(TEXT, 1000),
            "user_metadata": TEXT_METADATA,
            "display_name": TEXT | {"minLength": 1},
            "owner": SEARCH_OWNER,
            "statuses": listed(STATUS_QUERY, 16) | {"minItems": 1},
            "limit": integer(1, 200),
            "cursor": fields(
                {"last_created_at": {"type": "string", "format": "date-time"}, "last_session_id": TEXT},
            ),
        },
    ),
    "/sessions/{session_id}/finish": fields({"reason": fields({"type": one_of(*FINISH_TYPES)})}, {"detail": TEXT}),
    "/sessions/{session_id}/project": fields({"project_id": {"type": "string", "minLength": 1, "maxLength": 128}}),
    "/batch/jobs": fields(
        {
            "batch_serialized_fn": TEXT,
            "batch_input_format": ANYTHING,
            "batch_output_formats": {"type": "array", "items": ANYTHING, "minItems": 1},
            "batch_size": integer(1),
        },
        {
            "name": TEXT,
            "batch_pool_name": TEXT,
            "batch_error_format": ANYTHING,
            "batch_tokens": integer(1),
            "batch_activate_env": TEXT,
            "python": TEXT,
            "max_failed_rows": NUMBER,
            "rows": one_of("one", "any"),
            "if_exists": one_of("error", "overwrite"),
            "weight": NUMBER,
            "priority": integer(-(2**31)),
            "resume_from": integer(0),
            "directory": TEXT,
            "limits": ANYTHING,
        },
    ),
    "/batch/jobs/{job_id}/resume": fields(
        {}, {"batch_output_formats": {"type": "array", "items": ANYTHING, "minItems": 1}}
    ),
    "/batch/pools/{name}": fields({"workers": integer(0, 1024)}),
    "/create_model": fields(
        {"session_id": TEXT, "model_seq_id": POSITION, "base_model": TEXT},
        {
            "user_metadata": METADATA,
            "lora_config": ref("LoraConfig"),
            "optimizer_config": ref("OptimizerConfig"),
        },
    ),
    "/load_weights": fields(
        {"path": TEXT},
        {
            "model_id": TEXT,
            "seq_id": TRAINING_SEQ_ID,
            "session_id": TEXT,
            "model_seq_id": POSITION,
            "base_model": TEXT,
            "user_metadata": METADATA,
            "optimizer": FLAG,
            "optimizer_config": ref("OptimizerConfig"),
            "weights_access_token": TEXT,
        },
    ),
    "/log_metrics": fields(
        {"model_id": TEXT, "metrics": {"type": "object", "additionalProperties": NUMBER, "minProperties": 1}},
        {"step": integer(0, 2**53 - 1)},
    ),
    "/get_info": fields({"model_id": TEXT}),
    "/unload_model": fields({"model_id": TEXT}),
    "/create_custom_loss": fields(
        {
            "session_id": TEXT,
            "custom_loss_seq_id": POSITION,
            "inputs": {"type": "array", "items": ref("CustomLossInput")},
            "graph": ref("CustomLossGraph"),
        },
        {"name": {"type": "string", "maxLength": 128}},
    ),
    "/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl": fields({}, {"ttl_seconds": TTL}),
    "/weights_info": fields({"tinker_path": TEXT}),
    "/copy_weights": fields(
        {"source_path": TEXT},
        {
            "session_id": TEXT,
            "model_seq_id": POSITION,
            "destination_project_id": {"type": "string", "maxLength": 128},
            "ttl_seconds": TTL,
        },
    ),
    "/auth/token": ANYTHING,
    "/telemetry": fields(
        {},
        {
            "events": {"type": "array"},
            "platform": {"type": "string"},
            "sdk_version": {"type": "string"},
            "session_id": {"type": "string"},
            "process_uuid": {"type": "string"},
        },
    ),
    "/client/config": fields({}, {"sdk_version": {"type": "string"}}),
    "/client/dynamic_config": ANYTHING,
    "/delete_model": fields({"model_id": TEXT}),
    "/create_sampling_client": fields({}, {"model_path": TEXT, "base_model": TEXT}),
    "/sample": fields(
        {"prompts": {"type": "array", "minItems": 1, "maxItems": 1024}},
        {
            "sampling_client_id": TEXT,
            "sampling_session_id": TEXT,
            "model_path": TEXT,
            "base_model": TEXT,
            "sampling_params": {"type": "object"},
            "num_samples": integer(1, MAX_NUM_SAMPLES),
            "prompt_logprobs": FLAG,
            "topk_prompt_logprobs": POSITION,
        },
    ),
    "/cleanup_futures": fields({}, {"max_age_hours": {"type": "number", "minimum": 0, "maximum": 24 * 3650}}),
}
"""Every path that takes JSON, or a form. The dialect's `list_sessions` and the two that publish take no body."""
