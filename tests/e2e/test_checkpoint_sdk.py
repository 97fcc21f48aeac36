"""Checkpoints through the real SDK: two tenants with keys on one live server with the fake backend."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import tinker
from tinker import types

from support.databases import database_url
from support.live import LiveServer, serving
from tinsmith.auth.keys import Keys
from tinsmith.db.factory import open_database

NANO = "tinsmith/nano"
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": np.array([2, 3, 4]), "weights": np.ones(3, np.float32)},
)


@dataclass(frozen=True, slots=True)
class Tenant:
    key: str
    service: tinker.ServiceClient
    rest_client: tinker.RestClient


@dataclass(frozen=True, slots=True)
class World:
    server: LiveServer
    alice: Tenant
    bob: Tenant


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data_dir = tmp_path_factory.mktemp("checkpoints") / "data"
    data_dir.mkdir()
    database = open_database(database_url(data_dir) or f"sqlite:///{data_dir / 'tinsmith.db'}")
    database.migrate()
    alice, bob = (Keys(database).create(name)[1] for name in ("alice", "bob"))
    database.close()
    with serving(data_dir, "--backend", "fake") as server:
        with (
            tinker.ServiceClient(base_url=server.url, api_key=alice) as for_alice,
            tinker.ServiceClient(base_url=server.url, api_key=bob) as for_bob,
        ):
            yield World(server, _tenant(server, alice, for_alice), _tenant(server, bob, for_bob))


def _tenant(server: LiveServer, key: str, service: tinker.ServiceClient) -> Tenant:
    return Tenant(key, service, tinker.RestClient(base_url=server.url, api_key=key))


@pytest.fixture
def alice(world: World) -> Tenant:
    return world.alice


@pytest.fixture
def bob(world: World) -> Tenant:
    return world.bob


def train_new(tenant: Tenant, steps: int = 2, **options: object) -> tinker.TrainingClient:
    client = tenant.service.create_lora_training_client(NANO, rank=4, **options).result()  # type: ignore[arg-type]
    train(client, steps)
    return client


def train(client: tinker.TrainingClient, steps: int) -> float:
    """Take some optimizer steps and return the step count."""
    count = 0.0
    for _ in range(steps):
        client.forward_backward([DATUM], "cross_entropy").result()
        metrics = client.optim_step(types.AdamParams(learning_rate=0.1)).result().metrics
        assert metrics is not None
        count = metrics["step"]
    return count


def loss(client: tinker.TrainingClient) -> float:
    return client.forward([DATUM], "cross_entropy").result().metrics["loss:sum"]


def checkpoint(tenant: Tenant, path: str) -> types.Checkpoint:
    run_id = path.split("/")[2]
    return next(c for c in tenant.rest_client.list_checkpoints(run_id).result().checkpoints if c.tinker_path == path)


def raises_refusal(words: str):
    return pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match=words)


# Saving and loading.


def test_a_saved_state_is_overwritten_on_purpose_only(alice: Tenant) -> None:
    client = train_new(alice)
    first = client.save_state("a", ttl_seconds=3600, user_metadata={"step": "2"}).result().path
    before = loss(client)
    train(client, 1)
    with raises_refusal("exists already; pass overwrite=True"):
        client.save_state("a").result()
    assert checkpoint(alice, first).user_metadata == {"step": "2"}
    assert client.save_state("a", overwrite=True, user_metadata={"step": "3"}).result().path == first
    info = checkpoint(alice, first)
    assert (info.user_metadata, info.expires_at) == ({"step": "3"}, None)
    assert loss(alice.service.create_training_client_from_state(first).result()) == loss(client) != before
    with raises_refusal("ttl_seconds is 60"):
        client.save_state("b", ttl_seconds=60).result()


def test_loading_with_and_without_the_optimizer(alice: Tenant) -> None:
    client = train_new(alice, steps=3)
    path = client.save_state("a").result().path
    sampler_path = client.save_weights_for_sampler("a").result().path
    service = alice.service
    for future, steps in (
        (service.create_training_client_from_state_with_optimizer(path), 4),
        (service.create_training_client_from_state(path), 1),
        (service.create_training_client_from_state(sampler_path), 1),
    ):
        loaded = future.result()
        assert loss(loaded) == loss(client)
        assert train(loaded, 1) == steps
    with raises_refusal("holds no optimizer state"):
        service.create_training_client_from_state_with_optimizer(sampler_path).result()


def test_loading_into_an_existing_model(alice: Tenant) -> None:
    client = train_new(alice, steps=3)
    path = client.save_state("a").result().path
    for method, steps in (("load_state", 1), ("load_state_with_optimizer", 4)):
        other = alice.service.create_lora_training_client(NANO, rank=4).result()
        with pytest.warns(FutureWarning, match="deprecated|not be supported"):
            getattr(other, method)(path).result()
        assert loss(other) == loss(client)
        assert train(other, 1) == steps
    wrong = alice.service.create_lora_training_client(NANO, rank=8).result()
    with pytest.warns(FutureWarning), raises_refusal("create the model from the checkpoint instead"):
        wrong.load_state(path).result()
    assert train(wrong, 1) == 1  # the refused number counts as used
    before = loss(wrong)
    with pytest.warns(FutureWarning), raises_refusal("create the model from the checkpoint instead"):
        wrong.load_state(path).result()
    assert loss(wrong) == before and train(wrong, 1) == 2, "its optimizer is where it was"


def test_loading_in_the_middle_of_a_run(alice: Tenant) -> None:
    client = train_new(alice, steps=3)
    path, saved = client.save_state("a").result().path, loss(client)
    for method, steps in (("load_state_with_optimizer", 4), ("load_state", 1)):
        train(client, 2)
        with pytest.warns(FutureWarning, match="deprecated|not be supported"):
            loading = getattr(client, method)(path)
        after = client.forward([DATUM], "cross_entropy")
        assert loading.result().path == path
        assert after.result().metrics["loss:sum"] == saved
        assert train(client, 1) == steps


def test_a_base_model_that_is_not_the_checkpoints_is_refused(alice: Tenant) -> None:
    path = train_new(alice).save_state("a").result().path
    loaded = alice.service.create_training_client_from_state(path, base_model=NANO).result()
    assert loaded.get_info().model_data.model_name == NANO
    with raises_refusal("'some/other' is not served here"):
        alice.service.create_training_client_from_state(path, base_model="some/other").result()


def test_user_metadata_belongs_to_the_run_that_it_was_given_to(alice: Tenant) -> None:
    client = train_new(alice, user_metadata={"renderer_name": "role_colon"})
    path = client.save_state("a").result().path
    assert alice.rest_client.get_training_run_by_tinker_path(path).result().user_metadata == {
        "renderer_name": "role_colon"
    }
    loaded = alice.service.create_training_client_from_state(path, user_metadata={"stage": "2"}).result()
    assert alice.rest_client.get_training_run(loaded.model_id).result().user_metadata == {"stage": "2"}


# Exports.


@pytest.mark.smoke
@pytest.mark.covers("RestClient.get_external_weights_urls")
def test_an_export_is_downloaded_without_a_key(alice: Tenant, bob: Tenant) -> None:
    client = train_new(alice)
    path = client.save_weights_external("export", ttl_seconds=3600).result().path
    links = alice.rest_client.get_external_weights_urls(path).result()
    (url,) = links.urls.values()
    with urllib.request.urlopen(url, timeout=60) as answer:
        content = answer.read()
        assert answer.headers["Content-Length"] == str(len(content))
    assert json.loads(content)["step"] is None
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(url[:-2], timeout=60)
    with raises_refusal("does not exist"):
        bob.rest_client.get_external_weights_urls(path).result()
    with raises_refusal("is an export; load a 'weights' checkpoint"):
        alice.service.create_training_client_from_state(path).result()
    alice.rest_client.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(urllib.error.HTTPError, match="410"):
        urllib.request.urlopen(url, timeout=60)


def test_recipients_that_cannot_be_read_are_refused_by_name(alice: Tenant) -> None:
    client = train_new(alice)
    with raises_refusal(r"age_encryption_recipients\[0\] cannot be read"):
        client.save_weights_external("x", age_encryption_recipients=["somebody"]).result()
    with raises_refusal("age_encryption_recipients"):
        client.save_weights_external("x", age_encryption_recipients=["age1"] * 11).result()
    train(client, 1)


# Sharing.


@pytest.mark.smoke
@pytest.mark.covers(
    "RestClient.publish_checkpoint_from_tinker_path", "RestClient.unpublish_checkpoint_from_tinker_path"
)
def test_a_published_checkpoint_is_sampled_and_trained_by_others_until_it_is_not(alice: Tenant, bob: Tenant) -> None:
    client = train_new(alice)
    path = client.save_weights_for_sampler("shared").result().path
    prompt = types.ModelInput.from_ints([1, 2, 3])
    with pytest.raises(tinker.NotFoundError):
        bob.service.create_sampling_client(model_path=path).result()
    alice.rest_client.publish_checkpoint_from_tinker_path(path).result()
    sampler = bob.service.create_sampling_client(model_path=path).result()
    params = types.SamplingParams(max_tokens=2, seed=1)
    theirs = sampler.sample(prompt, 1, params).result().sequences[0].tokens
    assert loss(bob.service.create_training_client_from_state(path).result()) == loss(client)
    alice.rest_client.unpublish_checkpoint_from_tinker_path(path).result()
    assert sampler.sample(prompt, 1, params).result().sequences[0].tokens == theirs  # it is loaded
    with pytest.raises(tinker.NotFoundError):
        bob.service.create_sampling_client(model_path=path).result()
    with raises_refusal("does not exist"):
        bob.service.create_training_client_from_state(path).result()


def test_an_access_token_opens_its_owners_checkpoints(world: World, alice: Tenant, bob: Tenant) -> None:
    client = train_new(alice, steps=3)
    path = client.save_state("private").result().path
    service = bob.service
    loaded = service.create_training_client_from_state_with_optimizer(path, weights_access_token=alice.key).result()
    assert (loss(loaded), train(loaded, 1)) == (loss(client), 4)
    other = service.create_lora_training_client(NANO, rank=4).result()
    with pytest.warns(FutureWarning):
        other.load_state(path, weights_access_token=alice.key).result()
    assert loss(other) == loss(client)
    copied = bob.rest_client.copy_weights(path, "mine", weights_access_token=alice.key).result()
    assert loss(service.create_training_client_from_state(copied).result()) == loss(client)
    wrong = f"tml-{uuid.uuid4().hex}"
    for make in (
        lambda: service.create_training_client_from_state(path, weights_access_token=wrong),
        lambda: bob.rest_client.copy_weights(path, "mine", weights_access_token=wrong),
    ):
        with raises_refusal("weights_access_token is not a valid key"):
            make().result()
    for file in (path for path in world.server.data_dir.rglob("*") if path.is_file()):
        content = file.read_bytes()
        assert alice.key.encode() not in content and wrong.encode() not in content, file


# Copies.


@pytest.mark.covers("RestClient.copy_weights", "POST /copy_weights")
def test_a_copy_outlives_its_source_and_trains_on(alice: Tenant) -> None:
    client = train_new(alice, steps=3)
    path = client.save_state("a", ttl_seconds=3600, user_metadata={"step": "3"}).result().path
    copied = alice.rest_client.copy_weights(path, "archive").result()
    info = checkpoint(alice, copied)
    assert (info.user_metadata, info.expires_at) == ({"step": "3"}, None)
    alice.rest_client.delete_checkpoint_from_tinker_path(path).result()
    loaded = alice.service.create_training_client_from_state_with_optimizer(copied).result()
    assert (loss(loaded), train(loaded, 1)) == (loss(client), 4)
    run = alice.rest_client.get_training_run_by_tinker_path(copied).result()
    assert run.last_checkpoint is not None and run.last_checkpoint.tinker_path == copied
    runs = alice.rest_client.list_training_runs(project_id="archive").result().training_runs
    assert [run.training_run_id for run in runs] == [run.training_run_id]


@pytest.mark.covers("ServiceClient.copy_weights")
def test_a_service_client_copies_into_its_project(world: World, alice: Tenant) -> None:
    path = train_new(alice).save_weights_for_sampler("a").result().path
    with tinker.ServiceClient(base_url=world.server.url, api_key=alice.key, project_id="home") as service:
        copied = service.copy_weights(path, ttl_seconds=7200).result()
        assert checkpoint(alice, copied).expires_at is not None
        service.create_sampling_client(model_path=copied).result()
