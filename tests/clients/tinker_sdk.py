"""A version of the tinker SDK against a server: it trains, samples, scores, saves, resumes and reads its runs.

The line before the last is a JSON object with the numbers, which are the same with every version.
"""

import asyncio
import json
import struct
import sys
import warnings

import tinker
from checks import KEY, NANO, URL, check
from tinker import types

TOKENS = list(range(5, 21))
INPUT, TARGETS = types.ModelInput.from_ints(TOKENS[:-1]), TOKENS[1:]
PROMPT = types.ModelInput.from_ints(TOKENS[:6])
GREEDY = types.SamplingParams(max_tokens=5, temperature=0.0, seed=3)
ADAM = types.AdamParams(learning_rate=1e-2)
WIDTH = 256
"""Targets for each position. 20 such data have a result of more than 256 KiB, which is announced by its size first."""

warnings.simplefilter("ignore")  # the newest SDK deprecates methods that the old ones need
figures: dict[str, object] = {}


def datum(weight: float = 1.0, width: int = 0, targets: list[int] = TARGETS) -> types.Datum:
    targets = [token for token in targets for _ in range(width or 1)]
    shape = [len(TARGETS), width] if width else [len(TARGETS)]
    inputs = {
        "target_tokens": types.TensorData(data=targets, dtype="int64", shape=shape),
        "weights": types.TensorData(data=[weight] * len(targets), dtype="float32", shape=shape),
    }
    return types.Datum(model_input=INPUT, loss_fn_inputs=inputs)


def float32(values: object) -> list[float | None]:
    """Round what JSON may bring with fewer digits."""
    return [None if value is None else struct.unpack("f", struct.pack("f", value))[0] for value in list(values)]  # type: ignore[call-overload]


def step(training: tinker.TrainingClient) -> float:
    passed = training.forward_backward([datum()], "cross_entropy")
    stepped = training.optim_step(ADAM)
    result = passed.result()
    stepped.result()
    return result.metrics["loss:sum"]


service = tinker.ServiceClient(base_url=URL, api_key=KEY)
training = service.create_lora_training_client(base_model=NANO, rank=8, seed=7)

with check("it trains"):
    figures["losses"] = [step(training), step(training)]
with check("it evaluates"):
    output = training.forward([datum(), datum(0.5)], "cross_entropy").result()
    figures["forward"] = output.metrics["loss:sum"]
    figures["logprobs"] = [float32(fields["logprobs"].tolist()) for fields in output.loss_fn_outputs]
with check("large results"):
    output = training.forward([datum(width=WIDTH)] * 20, "cross_entropy").result()
    rows = output.loss_fn_outputs[-1]["logprobs"].to_numpy()
    assert len(output.loss_fn_outputs) == 20 and rows.shape == (len(TARGETS), WIDTH)
    figures["large"] = float32(rows[:, -1].tolist())
with check("it samples, with logprobs of the prompt"):
    weights = training.save_weights_for_sampler("sampler").result().path
    sampling = service.create_sampling_client(model_path=weights)
    options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    sample = sampling.sample(prompt=PROMPT, num_samples=2, sampling_params=GREEDY, **options).result()
    figures["tokens"] = [list(sequence.tokens) for sequence in sample.sequences]
    figures["sampled"] = [float32(sequence.logprobs) for sequence in sample.sequences]
    figures["prompt"] = float32(sample.prompt_logprobs)
    figures["topk"] = [
        row and [[token, *float32([value])] for token, value in row] for row in sample.topk_prompt_logprobs
    ]
    figures["scores"] = float32(sampling.compute_logprobs(PROMPT).result())
with check("a base model is sampled"):
    base = service.create_sampling_client(base_model=NANO)
    figures["base"] = list(
        base.sample(prompt=PROMPT, num_samples=1, sampling_params=GREEDY).result().sequences[0].tokens
    )
with check("a saved state continues alike"):
    state = training.save_state("state").result().path
    third = step(training)
    restored = service.create_training_client_from_state_with_optimizer(state)
    figures["resumed"] = [third, step(restored)]
    assert third == figures["resumed"][1]
with check("the coroutines do the same"):

    async def run() -> float:
        client = await service.create_lora_training_client_async(base_model=NANO, rank=8, seed=7)
        passed = await client.forward_backward_async([datum()], "cross_entropy")
        stepped = await client.optim_step_async(ADAM)
        result = await passed.result_async()
        await stepped.result_async()
        return result.metrics["loss:sum"]

    figures["async"] = asyncio.run(run())
with check("a refusal reaches the client"):
    try:
        training.forward_backward([datum(targets=[10**6] * len(TARGETS))], "cross_entropy").result()
    except Exception as error:  # noqa: BLE001  versions raise different types
        assert "1000000" in str(error), error
    else:
        raise AssertionError("a token that does not exist was accepted")
    figures["after"] = step(training)
with check("runs and checkpoints are listed"):
    rest_client = service.create_rest_client()
    run_id = training.get_info().model_id if hasattr(training.get_info(), "model_id") else training.model_id
    names = [checkpoint.checkpoint_id for checkpoint in rest_client.list_checkpoints(run_id).result().checkpoints]
    figures["checkpoints"] = sorted(names)
    assert rest_client.get_training_run(run_id).result().base_model == NANO
with check("it reads what the server serves"):
    models = service.get_server_capabilities().supported_models
    assert NANO in [model.model_name for model in models]

sys.stdout.write(json.dumps(figures, sort_keys=True) + "\n")
