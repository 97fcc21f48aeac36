"""Keys and tokens on a live server: the real SDK, the `tinker` command and `tinsmith keys`. Also where secrets are
stored, and which addresses a server without keys may listen on.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import sqlalchemy as sa
import tinker
import zstandard
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError
from tinker.lib._jwt_auth import JwtAuthProvider

from support.databases import database_url
from support.live import LiveServer, environment, free_port, serving
from support.raw_client import PROTO, RawClient, pass_body
from tinsmith.auth import Caller
from tinsmith.auth.keys import Keys
from tinsmith.auth.signing import Signer
from tinsmith.auth.tokens import Tokens
from tinsmith.db.factory import open_database
from tinsmith.db.schema import BODIES, CUSTOM_LOSSES, METADATA
from tinsmith.settings import Settings

REVOKED_WITHIN_S = 5.0  # two attempts, on a slow machine


@dataclass(frozen=True, slots=True)
class Keyed:
    """A live server with the keys of two tenants."""

    server: LiveServer
    alice: str
    bob: str

    def key(self, tenant: str, *options: str) -> tuple[int, str]:
        """(id, key) of a new key."""
        completed = keys_command(self.server.data_dir, "create", tenant, *options)
        key_id = re.search(r"key (\d+) of tenant", completed.stderr)
        assert key_id, completed.stderr
        return int(key_id.group(1)), completed.stdout.strip()

    def get(self, path: str, key: str) -> httpx.Response:
        return httpx.get(f"{self.server.url}/api/v1/{path}", headers={"X-API-Key": key}, timeout=60)

    def post(self, path: str, body: object, key: str) -> httpx.Response:
        return httpx.post(f"{self.server.url}/api/v1/{path}", json=body, headers={"X-API-Key": key}, timeout=60)

    def service(self, key: str) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.server.url, api_key=key)


def keys_command(data_dir: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinsmith.cli", "keys", *arguments, "--data-dir", str(data_dir)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(data_dir))
    assert completed.returncode == status, completed.stderr
    return completed


@pytest.fixture(scope="module")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """A server whose first key is created while it runs."""
    with serving(tmp_path_factory.mktemp("keyed") / "data", "--backend", "fake") as server:
        assert server.get("sessions").status_code == 200, "without keys, any will do"
        first = keys_command(server.data_dir, "create", "alice", "--name", "laptop")
        assert f"keys create local --data-dir {server.data_dir}`" in first.stderr, "what was there before is local's"
        second = keys_command(server.data_dir, "create", "bob")
        assert "local" not in second.stderr
        deadline = time.monotonic() + REVOKED_WITHIN_S
        while server.get("sessions").status_code == 200:
            assert time.monotonic() < deadline, "the server stays open after its first key"
            time.sleep(0.05)
        yield Keyed(server, first.stdout.strip(), second.stdout.strip())


def datum() -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": np.array([2, 3, 4]), "weights": np.ones(3, np.float32)},
    )


def train_once(service: tinker.ServiceClient) -> tinker.TrainingClient:
    model = service.create_lora_training_client("tinsmith/nano", rank=4).result()
    model.forward_backward([datum()], "cross_entropy").result()
    model.optim_step(types.AdamParams(learning_rate=0.1)).result()
    return model


def provider_of(service: tinker.ServiceClient) -> JwtAuthProvider:
    provider = service.holder._default_auth
    assert isinstance(provider, JwtAuthProvider), "the SDK exchanges its key only if the server says so"
    return provider


# The SDK.


@pytest.mark.covers("POST /auth/token")
def test_a_whole_run_goes_by_token(keyed_server: Keyed) -> None:
    with keyed_server.service(keyed_server.alice) as service:
        train_once(service)
        token = provider_of(service)._token
        assert token.startswith("eyJ")
        assert keyed_server.get("auth/apikey/me", token).json()["name"] == "laptop"


@pytest.mark.covers("RestClient.whoami")
def test_the_sdk_knows_who_it_is(keyed_server: Keyed) -> None:
    identity = tinker.RestClient(base_url=keyed_server.server.url, api_key=keyed_server.bob).whoami().result()
    assert (identity.user_urn, identity.org_urn) == ("tml:organization_user:bob", "tml:organization:bob")
    assert identity.email == "bob@tinsmith.invalid"


def test_the_sdk_exchanges_its_key_again_when_its_token_is_refused(keyed_server: Keyed) -> None:
    """As after a change of the signing secret: the claims are valid, but the server refuses the signature."""
    foreign = Tokens(Signer(b"x" * 32)).issue(Caller("alice", 1, "laptop"))
    with keyed_server.service(keyed_server.alice) as service:
        model = train_once(service)
        provider_of(service)._token = foreign
        model.forward_backward([datum()], "cross_entropy").result()
        assert provider_of(service)._token not in ("", foreign)


def test_a_token_will_do_for_a_key(keyed_server: Keyed) -> None:
    token = keyed_server.post("auth/token", {}, keyed_server.alice).json()["jwt"]
    with keyed_server.service(token) as service:
        train_once(service)


def test_an_unknown_key_is_refused(keyed_server: Keyed) -> None:
    with pytest.raises(tinker.AuthenticationError, match="does not know the API key"):
        tinker.RestClient(base_url=keyed_server.server.url, api_key="tml-unknown").get_server_capabilities().result()


def test_a_revoked_key_and_its_tokens_end_in_the_middle_of_a_run(keyed_server: Keyed) -> None:
    key_id, key = keyed_server.key("carol")
    service = keyed_server.service(key)
    model = train_once(service)
    token = provider_of(service)._token
    keys_command(keyed_server.server.data_dir, "revoke", str(key_id))
    deadline = time.monotonic() + REVOKED_WITHIN_S
    while any(keyed_server.get("sessions", credential).status_code == 200 for credential in (key, token)):
        assert time.monotonic() < deadline, "a revoked key still opens the server"
        time.sleep(0.05)
    with pytest.raises(tinker.AuthenticationError, match="revoked"):
        model.forward_backward([datum()], "cross_entropy").result()
    with pytest.raises(tinker.AuthenticationError):
        service.close("errored").result()


def test_two_tenants_share_only_published_objects(keyed_server: Keyed) -> None:
    with keyed_server.service(keyed_server.alice) as hers, keyed_server.service(keyed_server.bob) as his:
        model = train_once(hers)
        path = model.save_state("shared").result().path
        rest_client = tinker.RestClient(base_url=keyed_server.server.url, api_key=keyed_server.bob)
        for attempt in (
            lambda: rest_client.get_training_run(model.model_id).result(),
            lambda: rest_client.list_checkpoints(model.model_id).result(),
            lambda: rest_client.delete_checkpoint_from_tinker_path(path).result(),
            lambda: rest_client.publish_checkpoint_from_tinker_path(path).result(),
            lambda: rest_client.get_session(hers.holder.get_session_id()).result(),
        ):
            with pytest.raises(tinker.NotFoundError):
                attempt()
        with pytest.raises(tinker.TinkerError, match="does not exist"):
            his.create_training_client_from_state(path).result()
        assert rest_client.list_training_runs().result().training_runs == []
        owner = tinker.RestClient(base_url=keyed_server.server.url, api_key=keyed_server.alice)
        owner.publish_checkpoint_from_tinker_path(path).result()
        copy = his.create_training_client_from_state(path).result()
        copy.forward_backward([datum()], "cross_entropy").result()
        assert [run.training_run_id for run in rest_client.list_training_runs().result().training_runs] == [
            copy.model_id
        ]


# The `tinker` command.


@pytest.fixture
def run_tinker(keyed_server: Keyed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Run the command with its own home directory; return its exit status and output."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TINKER_BASE_URL", keyed_server.server.url)

    def run(*arguments: str, key: str = "", typed: str = "") -> tuple[int, str]:
        outcome = CliRunner(env={"TINKER_API_KEY": key}).invoke(main_cli, list(arguments), input=typed)
        error = outcome.exception
        details = f"{error.message} {error.details}" if isinstance(error, TinkerCliError) else ""
        return outcome.exit_code, outcome.output + details

    return run


@pytest.mark.covers(
    "tinker auth login", "tinker auth status", "tinker auth whoami", "tinker auth logout", "GET /auth/apikey/me"
)
def test_logging_in_working_and_logging_out(keyed_server: Keyed, run_tinker: Callable[..., tuple[int, str]]) -> None:
    status, said = run_tinker("auth", "login", typed=f"{keyed_server.alice}\n")
    assert status == 0, said
    assert "alice@tinsmith.invalid (alice)" in said and "'laptop'" in said
    status, said = run_tinker("auth", "status")
    assert (status, "Tinker accessible: yes" in said) == (0, True), said
    status, said = run_tinker("-f", "json", "auth", "whoami")
    assert json.loads(said)["org_urn"] == "tml:organization:alice", said
    status, said = run_tinker("auth", "logout")
    assert (status, "still active" in said) == (0, True), said
    assert keyed_server.get("sessions", keyed_server.alice).status_code == 200
    status, said = run_tinker("auth", "status")
    assert status != 0 and "Credentials available: no" in said


def test_a_wrong_key_cannot_log_in(keyed_server: Keyed, run_tinker: Callable[..., tuple[int, str]]) -> None:
    status, said = run_tinker("auth", "login", typed="tml-wrong\n")
    assert status != 0 and "does not know the API key" in said
    status, said = run_tinker("auth", "status", key="tml-wrong")
    assert status != 0 and "Tinker accessible: no" in said


@pytest.mark.covers("tinker auth logout", "DELETE /auth/apikey/me")
def test_logging_out_of_a_key_made_for_the_command_ends_the_key(
    keyed_server: Keyed, tmp_path: Path, run_tinker: Callable[..., tuple[int, str]]
) -> None:
    key_id, key = keyed_server.key("dora")
    details = {"org_details": {"name": "dora"}, "user_details": {"email": ""}}
    record = {"type": "generated", "key": key, "name": "x", "details": details}
    (tmp_path / ".tinker").mkdir()
    stored = {"version": 1, "default": str(key_id), "keys": {str(key_id): record}}
    (tmp_path / ".tinker" / "credentials.json").write_text(json.dumps(stored))
    status, said = run_tinker("auth", "logout")
    assert (status, "deleted its API key on the server" in said) == (0, True), said
    assert keyed_server.get("sessions", key).status_code == 401


# The `tinsmith keys` command.


def test_keys_are_listed_for_people_and_for_programs(keyed_server: Keyed) -> None:
    rows = json.loads(keys_command(keyed_server.server.data_dir, "list", "--json").stdout)
    assert {name: rows[0][name] for name in ("key_id", "tenant", "name", "revoked_at")} == {
        "key_id": 1,
        "tenant": "alice",
        "name": "laptop",
        "revoked_at": None,
    }
    table = keys_command(keyed_server.server.data_dir, "list").stdout
    assert "laptop" in table and "alice" in table and keyed_server.alice not in table


def test_a_quota_given_with_a_key_counts_at_once(keyed_server: Keyed) -> None:
    _, key = keyed_server.key("erin", "--quota", "models=1", "--quota", "queued_requests=50")
    session_id = keyed_server.post("create_session", {"tags": [], "sdk_version": "0.38.0"}, key).json()["session_id"]
    body = {"session_id": session_id, "base_model": "tinsmith/nano"}
    statuses = [keyed_server.post("create_model", body | {"model_seq_id": n}, key).status_code for n in (0, 1)]
    assert statuses == [200, 429]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("create", "a b"), "'a b' is not allowed"),
        (("create", "a", "--quota", "model=1"), "unknown quota 'model'"),
        (("revoke", "999"), "key 999 does not exist"),
    ],
)
def test_a_commands_user_error_is_one_line(keyed_server: Keyed, arguments: tuple[str, ...], words: str) -> None:
    completed = keys_command(keyed_server.server.data_dir, *arguments, status=2)
    assert len(completed.stderr.splitlines()) == 1 and words in completed.stderr, completed.stderr
    assert completed.stdout == ""


def test_the_command_for_a_key_reaches_the_servers_database_and_strangers_learn_no_path(keyed_server: Keyed) -> None:
    server = keyed_server.server
    log = (server.data_dir / "server.log").read_text()
    assert "API key     any" in log, "before the first key"
    answer = httpx.get(f"{server.url}/api/v1/sessions", headers={"X-API-Key": "tml-stranger"})
    assert answer.status_code == 401 and "tinsmith keys create TENANT --data-dir DIRECTORY" in answer.text
    assert str(server.data_dir) not in answer.text


def test_a_server_with_keys_may_listen_everywhere(tmp_path: Path) -> None:
    from tinsmith.errors import SettingsError
    from tinsmith.server import process as server

    settings = Settings(data_dir=tmp_path / "data", host="0.0.0.0", port=free_port(), backend="fake")
    with pytest.raises(SettingsError, match=f"keys create TENANT --data-dir {tmp_path / 'data'}"):
        server.build(settings)
    database = open_database(settings.resolved_database_url)
    Keys(database).create("alice")
    database.close()
    built = server.build(settings)
    try:
        assert not built.accepts_anyone
        assert "0.0.0.0" in built.url
    finally:
        built.listener.close()


# Secrets.


def files_below(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def all_rows(data_dir: Path) -> bytes:
    """The contents of the tables, decompressed, which a search of the database's file would not find."""
    database = open_database(database_url(data_dir) or f"sqlite:///{data_dir / 'tinsmith.db'}")
    values: list[object] = []
    with database.read() as connection:
        for table in METADATA.sorted_tables:
            values += [value for row in connection.execute(sa.select(table)) for value in row]
        packed = [
            *connection.scalars(sa.select(BODIES.c.body)),
            *connection.scalars(sa.select(CUSTOM_LOSSES.c.definition)),
        ]
    database.close()
    unpacked = [zstandard.ZstdDecompressor().decompressobj().decompress(blob) for blob in packed]
    return b"\n".join([*unpacked, *(value if isinstance(value, bytes) else str(value).encode() for value in values)])


def test_no_secret_is_kept_anywhere(keyed_server: Keyed) -> None:
    """No secret of a working session, a failed request or a client's report is stored."""
    key, other = keyed_server.alice, keyed_server.bob
    token = keyed_server.post("auth/token", {}, key).json()["jwt"]
    with keyed_server.service(key) as service:
        path = train_once(service).save_state("secret").result().path
        tokens = [token, provider_of(service)._token]
    http = httpx.Client(base_url=f"{keyed_server.server.url}/api/v1/", headers={"X-API-Key": token}, timeout=60)
    with http:
        client = RawClient(http)
        model_id = client.model()
        client.send("forward_backward", b"nonsense", **PROTO)
        client.send("forward_backward", pass_body(model_id, 1, loss_fn="no such loss"), **PROTO)
        client.post("optim_step", {"model_id": model_id, "seq_id": "x"})
        client.post("nowhere", {})
        event = {"event": "GENERIC_EVENT", "event_data": {"headers": {"X-API-Key": key, "x-api-key": token}}}
        report = {"events": [event], "platform": "x", "sdk_version": "x", "session_id": "s", "process_uuid": "p"}
        assert client.post("telemetry", report).status_code == 200
        session_id = client.session()
        for model_seq_id, access_token in enumerate((other, "tml-not-a-key-at-all")):
            body = {"session_id": session_id, "model_seq_id": model_seq_id, "path": path, "optimizer": False}
            client.post("load_weights", body | {"weights_access_token": access_token})
    keyed_server.get("sessions", key + "-wrong")
    keyed_server.get("sessions", token + "-wrong")
    secrets = [*tokens, key, other, "tml-not-a-key-at-all"]
    needles = [secret.removeprefix("tml-").encode() for secret in secrets]
    needles += [jwt.rpartition(".")[2].encode() for jwt in tokens]  # a signature alone would leak, too
    contents = files_below(keyed_server.server.data_dir) | {Path("all rows"): all_rows(keyed_server.server.data_dir)}
    assert session_id.encode() in contents[Path("all rows")] and any(path.suffix == ".log" for path in contents)
    leaks = [(path, needle) for path, content in contents.items() for needle in needles if needle in content]
    assert not leaks


def test_the_signing_secret_is_for_its_owner_alone(keyed_server: Keyed) -> None:
    path = keyed_server.server.data_dir / "signing.key"
    assert path.stat().st_mode & 0o777 == 0o600
