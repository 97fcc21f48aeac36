"""Every method of the SDK that no other test calls, and its async twin, against a live server. Other tests check what
the operations compute; here each method reaches its endpoint and returns the right type.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli

from integration.test_sampling_polls import with_flags
from support.compatibility import Witness
from support.live import API_KEY, LiveServer
from tinsmith.base_models import nano

NANO = nano.MODEL_NAME
TOKENS = [40, 41, 42, 43, 44]
PROMPT = types.ModelInput.from_ints(TOKENS)
ADAM = types.AdamParams(learning_rate=1e-3)

# The async twins, and the methods that they replaced, warn of their deprecation.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning"),
]


def data(*, weights: tuple[float, ...] | None = (1.0, 1.0, 1.0, 1.0)) -> list[types.Datum]:
    inputs = {"target_tokens": np.array(TOKENS[1:])}
    if weights is not None:
        inputs["weights"] = np.array(weights, np.float32)
    return [types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)]


def squares(_: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = torch.cat([row.flatten() for row in logprobs]).square().sum()
    return loss, {"squares:sum": loss.item()}


@pytest.fixture
def rest(fake_server: LiveServer) -> tinker.RestClient:
    return tinker.RestClient(base_url=fake_server.url, api_key=API_KEY)


@pytest.fixture
def admin(fake_server: LiveServer) -> tinker.AdminClient:
    return tinker.AdminClient(base_url=fake_server.url, api_key=API_KEY)


@pytest.fixture
def model(fake_service: tinker.ServiceClient) -> tinker.TrainingClient:
    return fake_service.create_lora_training_client(NANO, rank=4).result()


@pytest.mark.covers(
    "ServiceClient.create_lora_training_client",
    "ServiceClient.create_training_client_from_state",
    "ServiceClient.create_training_client_from_state_with_optimizer",
    "ServiceClient.create_sampling_client",
    "ServiceClient.get_server_capabilities",
    "ServiceClient.create_rest_client",
    "ServiceClient.get_telemetry",
    "ServiceClient.close",
    "POST /client/config",
    "POST /client/dynamic_config",
    "POST /create_session",
    "POST /create_model",
    "POST /load_weights",
    "POST /create_sampling_session",
    "POST /sessions/{session_id}/finish",
    "GET /get_server_capabilities",
)
def test_a_service_makes_every_client(fake_server: LiveServer) -> None:
    service = tinker.ServiceClient(base_url=fake_server.url, api_key=API_KEY)
    model = service.create_lora_training_client(NANO, rank=4).result()
    path = model.save_state("state").result().path
    for restored in (
        service.create_training_client_from_state(path).result(),
        service.create_training_client_from_state_with_optimizer(path).result(),
    ):
        assert restored.get_info().lora_rank == 4
        assert restored.model_id != model.model_id
    assert service.create_sampling_client(base_model=NANO).result().get_base_model() == NANO
    assert service.get_server_capabilities().supported_models[0].model_name == NANO
    assert service.create_rest_client().get_training_run(model.model_id).result().base_model == NANO
    assert service.get_telemetry() is None, "the tests turn telemetry off"
    service.close("success").result()


@pytest.mark.covers(
    "ServiceClient.create_lora_training_client_async",
    "ServiceClient.create_training_client_from_state_async",
    "ServiceClient.create_training_client_from_state_with_optimizer_async",
    "ServiceClient.create_sampling_client_async",
    "ServiceClient.get_server_capabilities_async",
)
def test_a_service_makes_every_client_for_those_who_await(fake_service: tinker.ServiceClient) -> None:
    async def drive() -> None:
        model = await fake_service.create_lora_training_client_async(NANO, rank=4)
        path = (await (await model.save_state_async("state")).result_async()).path
        for restored in (
            await fake_service.create_training_client_from_state_async(path),
            await fake_service.create_training_client_from_state_with_optimizer_async(path),
        ):
            assert restored.model_id != model.model_id
        sampler = await fake_service.create_sampling_client_async(base_model=NANO)
        assert await sampler.get_base_model_async() == NANO
        capabilities = await fake_service.get_server_capabilities_async()
        assert capabilities.supported_models[0].model_name == NANO

    asyncio.run(drive())


def test_a_forward_tells_the_loss_of_every_token(model: tinker.TrainingClient) -> None:
    (output,) = model.forward(data(weights=(0.0, 0.5, 1.0, 1.0)), "cross_entropy").result().loss_fn_outputs
    logprobs, losses = output["logprobs"].to_numpy(), output["elementwise_loss"].to_numpy()
    assert losses.tolist() == [0.0, *(-np.array([0.5, 1, 1], np.float32) * logprobs[1:]).tolist()]


def test_weights_may_be_left_out(model: tinker.TrainingClient) -> None:
    given, left_out = (model.forward(data(weights=each), "cross_entropy").result() for each in ((1.0,) * 4, None))
    assert left_out.metrics == given.metrics


@pytest.mark.covers(
    "TrainingClient.forward",
    "TrainingClient.forward_backward",
    "TrainingClient.forward_backward_custom",
    "TrainingClient.optim_step",
    "TrainingClient.save_state",
    "TrainingClient.save_weights_for_sampler",
    "TrainingClient.save_weights_external",
    "TrainingClient.save_weights_and_get_sampling_client",
    "TrainingClient.create_sampling_client",
    "TrainingClient.get_info",
    "TrainingClient.get_tokenizer",
    "TrainingClient.get_telemetry",
    "POST /forward_backward",
    "POST /optim_step",
    "POST /save_weights",
    "POST /save_weights_for_sampler",
    "POST /save_weights_external",
    "POST /get_info",
    "POST /retrieve_future",
)
def test_a_model_does_everything(model: tinker.TrainingClient) -> None:
    scored = model.forward(data(), "cross_entropy").result()
    assert np.isfinite(scored.metrics["loss:sum"])
    passed = model.forward_backward(data(), "cross_entropy").result()
    assert passed.metrics["loss:sum"] == pytest.approx(scored.metrics["loss:sum"])
    custom = model.forward_backward_custom(data(), squares).result()
    assert custom.metrics["squares:sum"] == pytest.approx(
        sum(float(np.square(output["logprobs"].to_numpy()).sum()) for output in scored.loss_fn_outputs), rel=1e-4
    )
    assert model.optim_step(ADAM).result().metrics is not None
    assert "/weights/state" in model.save_state("state").result().path
    sampler_path = model.save_weights_for_sampler("sampler").result().path
    assert "/sampler_weights/sampler" in sampler_path
    assert "/external_weights/export" in model.save_weights_external("export").result().path
    for sampler in (
        model.create_sampling_client(sampler_path).result(),
        model.save_weights_and_get_sampling_client().result(),
    ):
        assert sampler.get_base_model() == NANO
    assert model.get_info().model_data.model_name == NANO
    assert model.get_tokenizer().decode(model.get_tokenizer().encode("hello")) == "hello"
    assert model.get_telemetry() is None


@pytest.mark.covers(
    "TrainingClient.forward_async",
    "TrainingClient.forward_backward_async",
    "TrainingClient.forward_backward_custom_async",
    "TrainingClient.optim_step_async",
    "TrainingClient.save_state_async",
    "TrainingClient.save_weights_for_sampler_async",
    "TrainingClient.save_weights_external_async",
    "TrainingClient.save_weights_and_get_sampling_client_async",
    "TrainingClient.create_sampling_client_async",
    "TrainingClient.get_info_async",
)
def test_a_model_does_everything_for_those_who_await(model: tinker.TrainingClient) -> None:
    async def drive() -> None:
        scored = await (await model.forward_async(data(), "cross_entropy")).result_async()
        passed = await (await model.forward_backward_async(data(), "cross_entropy")).result_async()
        assert passed.metrics["loss:sum"] == pytest.approx(scored.metrics["loss:sum"])
        custom = await (await model.forward_backward_custom_async(data(), squares)).result_async()
        assert "squares:sum" in custom.metrics
        assert (await (await model.optim_step_async(ADAM)).result_async()).metrics is not None
        assert "/weights/" in (await (await model.save_state_async("state")).result_async()).path
        saved = await (await model.save_weights_for_sampler_async("sampler")).result_async()
        export = await (await model.save_weights_external_async("export")).result_async()
        assert "/external_weights/" in export.path
        for sampler in (
            await model.create_sampling_client_async(saved.path),
            await model.save_weights_and_get_sampling_client_async(),
        ):
            assert await sampler.get_base_model_async() == NANO
        assert (await model.get_info_async()).lora_rank == 4

    asyncio.run(drive())


@pytest.mark.covers(
    "TrainingClient.load_state",
    "TrainingClient.load_state_with_optimizer",
    "TrainingClient.load_state_async",
    "TrainingClient.load_state_with_optimizer_async",
)
def test_a_new_model_takes_a_state_the_old_way(
    fake_service: tinker.ServiceClient, model: tinker.TrainingClient
) -> None:
    model.forward_backward(data(), "cross_entropy").result()
    model.optim_step(ADAM).result()
    trained = model.forward(data(), "cross_entropy").result().metrics["loss:sum"]
    path = model.save_state("state").result().path

    def scores_as_trained(load: Callable[[tinker.TrainingClient], object]) -> bool:
        fresh = fake_service.create_lora_training_client(NANO, rank=4).result()
        load(fresh)
        return fresh.forward(data(), "cross_entropy").result().metrics["loss:sum"] == pytest.approx(trained)

    async def awaiting(future: object) -> object:
        return await (await future).result_async()  # pyright: ignore

    assert scores_as_trained(lambda fresh: fresh.load_state(path).result())
    assert scores_as_trained(lambda fresh: fresh.load_state_with_optimizer(path).result())
    assert scores_as_trained(lambda fresh: asyncio.run(awaiting(fresh.load_state_async(path))))
    assert scores_as_trained(lambda fresh: asyncio.run(awaiting(fresh.load_state_with_optimizer_async(path))))


@pytest.mark.covers(
    "SamplingClient.create",
    "SamplingClient.sample",
    "SamplingClient.sample_async",
    "SamplingClient.compute_logprobs",
    "SamplingClient.compute_logprobs_async",
    "SamplingClient.get_base_model",
    "SamplingClient.get_base_model_async",
    "SamplingClient.get_tokenizer",
    "SamplingClient.get_telemetry",
    "POST /asample",
)
def test_a_sampler_does_everything(
    fake_service: tinker.ServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A sampling client loads a tokenizer by the base model's name, so a directory of that name is provided.
    (tmp_path / NANO).parent.mkdir()
    (tmp_path / NANO).symlink_to(nano.path(), target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    sampler = tinker.SamplingClient.create(fake_service.holder, base_model=NANO).result()
    greedy = types.SamplingParams(max_tokens=3, temperature=0, seed=1)
    answer = sampler.sample(PROMPT, 2, greedy).result()
    assert [len(sequence.tokens) for sequence in answer.sequences] == [3, 3]
    logprobs = sampler.compute_logprobs(PROMPT).result()
    assert logprobs[0] is None and len(logprobs) == len(TOKENS)

    async def drive() -> None:
        again = await sampler.sample_async(PROMPT, 2, greedy)
        assert [sequence.tokens for sequence in again.sequences] == [s.tokens for s in answer.sequences]
        assert await sampler.compute_logprobs_async(PROMPT) == pytest.approx(logprobs)
        assert await sampler.get_base_model_async() == NANO

    asyncio.run(drive())
    assert sampler.get_base_model() == NANO
    assert sampler.get_tokenizer().decode(sampler.get_tokenizer().encode("hello")) == "hello"
    assert sampler.get_telemetry() is None


@pytest.mark.covers("POST /retrieve_futures")
def test_samples_of_a_sampler_are_polled_together(fake_service: tinker.ServiceClient) -> None:
    sampler = (
        with_flags(fake_service, sample_use_retrieve_futures=True).create_sampling_client(base_model=NANO).result()
    )
    futures = [sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)) for _ in range(4)]
    assert [len(future.result().sequences[0].tokens) for future in futures] == [2, 2, 2, 2]


@pytest.mark.covers(
    "SamplingClient.get_sampler_handle", "SamplingClient.from_sampler_handle", "POST /join_sampling_session"
)
def test_a_sampler_is_handed_on(fake_service: tinker.ServiceClient) -> None:
    sampler = fake_service.create_sampling_client(base_model=NANO).result()
    other = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=API_KEY)
    greedy = types.SamplingParams(max_tokens=3, temperature=0)
    answers = [client.sample(PROMPT, 1, greedy).result().sequences[0].tokens for client in (sampler, other)]
    assert answers[0] == answers[1]


@pytest.mark.extended
@pytest.mark.covers("POST /telemetry", "POST /session_heartbeat")
def test_a_clients_periodic_requests_are_accepted(
    fake_server: LiveServer, monkeypatch: pytest.MonkeyPatch, witness: Witness
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "1")
    deadline = time.monotonic() + 20
    with tinker.ServiceClient(base_url=fake_server.url, api_key=API_KEY) as service:
        service.create_sampling_client(base_model=NANO).result()  # no session before the first use
        while not {"POST /telemetry", "POST /session_heartbeat"} <= witness.called_names:
            assert time.monotonic() < deadline, "neither came"
            time.sleep(0.1)
        assert service.get_telemetry() is not None


@dataclass(frozen=True, slots=True)
class Run:
    """A session with a model, its checkpoints and a sampler."""

    session_id: str
    run_id: str
    sampler_id: str
    training: str
    sampler: str
    export: str


@pytest.fixture
def run(rest: tinker.RestClient, fake_service: tinker.ServiceClient, model: tinker.TrainingClient) -> Run:
    fake_service.create_sampling_client(base_model=NANO).result()
    session_id = fake_service.holder.get_session_id()
    return Run(
        session_id=session_id,
        run_id=model.model_id,
        sampler_id=rest.get_session(session_id).result().sampler_ids[0],
        training=model.save_state("state").result().path,
        sampler=model.save_weights_for_sampler("sampler").result().path,
        export=model.save_weights_external("export").result().path,
    )


def both(client: object, method: str, *arguments: object) -> tuple[object, object]:
    """Return the results of a method and of its async twin."""
    plain = getattr(client, method)(*arguments).result()

    async def awaited() -> object:
        return await getattr(client, f"{method}_async")(*arguments)

    return plain, asyncio.run(awaited())


@pytest.mark.covers(
    "RestClient.get_training_run",
    "RestClient.get_training_run_async",
    "RestClient.get_training_run_by_tinker_path",
    "RestClient.get_training_run_by_tinker_path_async",
    "RestClient.list_training_runs",
    "RestClient.list_training_runs_async",
    "RestClient.list_checkpoints",
    "RestClient.list_checkpoints_async",
    "RestClient.list_user_checkpoints",
    "RestClient.list_user_checkpoints_async",
    "RestClient.get_session",
    "RestClient.get_session_async",
    "RestClient.list_sessions",
    "RestClient.list_sessions_async",
    "RestClient.get_sampler",
    "RestClient.get_sampler_async",
    "RestClient.get_server_capabilities",
    "RestClient.get_weights_info_by_tinker_path",
    "RestClient.get_telemetry",
    "RestClient.search_sessions",
    "GET /training_runs",
    "GET /training_runs/{run_id}",
    "GET /training_runs/{run_id}/checkpoints",
    "GET /checkpoints",
    "GET /sessions",
    "GET /sessions/{session_id}",
    "GET /samplers/{sampling_session_id}",
    "POST /sessions/search",
    "POST /weights_info",
)
def test_objects_can_be_read(rest: tinker.RestClient, run: Run) -> None:
    for found in both(rest, "get_training_run", run.run_id):
        assert (found.training_run_id, found.base_model) == (run.run_id, NANO)
    for found in both(rest, "get_training_run_by_tinker_path", run.sampler):
        assert found.training_run_id == run.run_id
    for found in both(rest, "list_training_runs"):
        assert run.run_id in {each.training_run_id for each in found.training_runs}
    for found in both(rest, "list_checkpoints", run.run_id):
        assert {each.tinker_path for each in found.checkpoints} == {run.training, run.sampler, run.export}
    for found in both(rest, "list_user_checkpoints"):
        assert {run.training, run.sampler, run.export} <= {each.tinker_path for each in found.checkpoints}
    for found in both(rest, "get_session", run.session_id):
        assert (found.training_run_ids, found.sampler_ids) == ([run.run_id], [run.sampler_id])
    for found in both(rest, "list_sessions"):
        assert run.session_id in found.sessions
    for found in both(rest, "get_sampler", run.sampler_id):
        assert found.base_model == NANO
    assert rest.get_server_capabilities().result().supported_models[0].model_name == NANO
    assert rest.get_weights_info_by_tinker_path(run.training).result().lora_rank == 4
    searched = rest.search_sessions(types.SessionSearchRequest(session_id=run.session_id)).result()
    assert [each.session_id for each in searched.sessions] == [run.session_id]
    assert rest.get_telemetry() is None


@pytest.mark.covers(
    "RestClient.publish_checkpoint_from_tinker_path",
    "RestClient.publish_checkpoint_from_tinker_path_async",
    "RestClient.unpublish_checkpoint_from_tinker_path",
    "RestClient.unpublish_checkpoint_from_tinker_path_async",
    "RestClient.set_checkpoint_ttl_from_tinker_path",
    "RestClient.set_checkpoint_ttl_from_tinker_path_async",
    "RestClient.get_external_weights_urls",
    "RestClient.get_external_weights_urls_async",
    "RestClient.copy_weights",
    "RestClient.copy_weights_async",
    "RestClient.assign_session_project",
    "RestClient.assign_session_project_async",
    "RestClient.export_session_trace",
    "RestClient.export_session_trace_async",
    "POST /training_runs/{run_id}/checkpoints/{kind}/{name}/publish",
    "DELETE /training_runs/{run_id}/checkpoints/{kind}/{name}/publish",
    "PUT /training_runs/{run_id}/checkpoints/{kind}/{name}/ttl",
    "GET /training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls",
    "PUT /sessions/{session_id}/project",
    "GET /sessions/{session_id}/trace_export",
    "POST /copy_weights",
)
def test_objects_can_be_changed(rest: tinker.RestClient, run: Run) -> None:
    def checkpoint() -> types.Checkpoint:
        listed = rest.list_checkpoints(run.run_id).result().checkpoints
        return next(each for each in listed if each.tinker_path == run.training)

    both(rest, "publish_checkpoint_from_tinker_path", run.training)
    assert checkpoint().public
    both(rest, "unpublish_checkpoint_from_tinker_path", run.training)
    assert not checkpoint().public
    both(rest, "set_checkpoint_ttl_from_tinker_path", run.training, 3600)
    assert checkpoint().expires_at is not None
    for links in both(rest, "get_external_weights_urls", run.export):
        assert list(links.urls) == ["fake_adapter.json"]
    both(rest, "assign_session_project", run.session_id, "research")
    assert run.run_id in {
        each.training_run_id for each in rest.list_training_runs(project_id="research").result().training_runs
    }
    copies = both(rest, "copy_weights", run.sampler, "research")
    assert len({run.sampler, *copies}) == 3 and all(path.endswith("/sampler_weights/sampler") for path in copies)
    for link in both(rest, "export_session_trace", run.session_id):
        assert str(link).startswith("http")


@pytest.mark.covers(
    "RestClient.delete_checkpoint",
    "RestClient.delete_checkpoint_async",
    "RestClient.delete_checkpoint_from_tinker_path",
    "RestClient.delete_checkpoint_from_tinker_path_async",
    "DELETE /training_runs/{run_id}/checkpoints/{kind}/{name}",
)
def test_objects_can_be_deleted(rest: tinker.RestClient, model: tinker.TrainingClient) -> None:
    paths = [model.save_state(name).result().path for name in ("a", "b", "c", "d")]

    async def drive() -> None:
        await rest.delete_checkpoint_async(model.model_id, "weights/b")
        await rest.delete_checkpoint_from_tinker_path_async(paths[3])

    rest.delete_checkpoint(model.model_id, "weights/a").result()
    rest.delete_checkpoint_from_tinker_path(paths[2]).result()
    asyncio.run(drive())
    assert rest.list_checkpoints(model.model_id).result().checkpoints == []


@pytest.mark.covers(
    "AdminClient.get_audit_log",
    "AdminClient.get_audit_log_async",
    "AdminClient.get_billing_usage",
    "AdminClient.get_billing_usage_async",
    "AdminClient.get_current_checkpoint_storage_usage",
    "AdminClient.get_current_checkpoint_storage_usage_async",
    "AdminClient.get_telemetry",
    "RestClient.get_audit_log",
    "RestClient.get_audit_log_async",
    "RestClient.get_billing_usage",
    "RestClient.get_billing_usage_async",
    "RestClient.get_current_checkpoint_storage_usage",
    "RestClient.get_current_checkpoint_storage_usage_async",
    "GET /audit",
    "GET /billing/usage/events",
    "GET /billing/usage/checkpoints/current",
)
def test_activity_and_usage_can_be_read(rest: tinker.RestClient, admin: tinker.AdminClient, run: Run) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = (hour, hour + timedelta(hours=2))
    for client in (rest, admin):
        for log in both(client, "get_audit_log"):
            assert any(run.training in str(entry.event_details) for entry in log.entries)
        for used in both(client, "get_billing_usage", *window):
            assert any(row.event_info.type == "checkpoint" for row in used.data)
        for stored in both(client, "get_current_checkpoint_storage_usage"):
            assert sum(row.checkpoint_count for row in stored.data) >= 3
    assert admin.get_telemetry() is None


@pytest.mark.extended
@pytest.mark.covers(
    "tinker version",
    "tinker auth status",
    "tinker model list",
    "tinker session export-trace",
    "tinker billing usage",
    "tinker billing checkpoint-storage",
)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("version", tinker.__version__),
        ("auth status", "Tinker accessible: yes"),
        ("model list", NANO),
        ("session export-trace SESSION --output trace", "Downloading trace"),
        ("-f json billing usage TODAY TOMORROW", "checkpoint"),
        ("-f json billing checkpoint-storage", "checkpoint_count"),
    ],
)
def test_a_command_answers(
    fake_server: LiveServer, run: Run, arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    today = datetime.now(UTC).date()
    tomorrow = today + timedelta(days=1)
    known = {"SESSION": run.session_id, "TODAY": f"{today}T00:00:00Z", "TOMORROW": f"{tomorrow}T00:00:00Z"}
    command = [known.get(word, word) for word in arguments.split()]
    environment = {"TINKER_BASE_URL": fake_server.url, "TINKER_API_KEY": API_KEY}
    done = CliRunner().invoke(main_cli, command, env=environment)
    assert done.exit_code == 0, done.output
    assert words in done.output
