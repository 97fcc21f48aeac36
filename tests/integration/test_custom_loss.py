"""Custom losses: tables, refusals, the interpreter against the client's autograd, and both paths through the SDK."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import traced_losses
from support.live import LiveServer
from support.properties import examples
from support.traced_losses import LOSSES, in_client, parse_as_server, request, trace
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend, custom_loss
from tinsmith.backends.torch.custom_loss import CustomRun
from tinsmith.base_models import resolve
from tinsmith.errors import UserError
from tinsmith.losses import graphs
from tinsmith.plan.prefix_tree import MIN_SHARED_ROWS
from tinsmith.types import CustomLoss, Datum, LoraSpec, Pass, PassResult
from tinsmith.wire.custom_loss import create_custom_loss_of
from tinsmith.wire.fields import read_object


def arrays(datum: tinker.Datum) -> Datum:
    inputs = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
    return Datum(np.array(datum.model_input.to_ints(), np.int32), inputs)


def read(body: object) -> CustomLoss:
    loss = create_custom_loss_of(read_object(orjson.dumps(body))).loss
    graphs.check_graph(loss)
    return loss


# The tables.


def test_every_allowed_name_is_a_function_of_torch_math_or_operator() -> None:
    assert custom_loss._FUNCTIONS.keys() == graphs.FUNCTIONS
    assert custom_loss._METHODS.keys() == graphs.METHODS
    assert custom_loss._ATTRIBUTES.keys() == graphs.ATTRIBUTES


def test_nothing_allowed_draws_numbers_shows_old_memory_or_leaves_torch() -> None:
    for name in graphs.FUNCTIONS | graphs.METHODS:
        last = name.rpartition(".")[2]
        assert not any(word in last for word in ("rand", "empty", "dropout", "load", "save", "numpy", "tolist", "data"))
        assert not last.endswith("_") or last in ("and_", "or_")
    assert not {"out", "inplace", "generator", "requires_grad", "pin_memory"} & graphs.KEYWORDS


# The interpreter.


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", LOSSES)
@examples(15)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_loss_and_its_gradient_equal_the_clients(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    fn, ranks = LOSSES[name]
    handle = trace(fn, ranks)
    loss = parse_as_server(handle)
    data = [traced_losses.datum(rng, int(rng.integers(2, 30)), 50, ranks) for _ in range(3)]
    run = CustomRun(loss, [arrays(datum) for datum in data])
    expected: dict[str, float] = {}
    scored = []
    for index, datum in enumerate(data):
        shape = tuple(datum.loss_fn_inputs["target_tokens"].shape or ())
        leaf = torch.from_numpy(rng.normal(-4, 1, shape).astype(np.float32)).requires_grad_()
        total, metrics = handle.graph(leaf, *(datum.loss_fn_inputs[key].to_torch() for key in handle.input_names))
        total.backward()
        assert leaf.grad is not None
        weights = run.weights(index, leaf.detach())
        assert run.failure is None, run.failure
        torch.testing.assert_close(torch.from_numpy(-weights), leaf.grad, rtol=1e-5, atol=1e-5)
        for key, value in {"loss:sum": total, **metrics}.items():
            part = float(value) / (len(data) if key.endswith(":mean") else 1)
            expected[key] = expected.get(key, 0.0) + part
        scored.append(leaf.detach().numpy())
    assert run.finish(scored) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    again = CustomRun(loss, [arrays(datum) for datum in data])
    assert again.finish(scored) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def failure(fn: traced_losses.Loss, *, length: int = 4, **inputs: np.ndarray) -> str:
    ranks = {"logprobs": 1, **{name: value.ndim for name, value in inputs.items()}}
    loss = parse_as_server(trace(fn, ranks))
    datum = Datum(np.zeros(length, np.int32), {"target_tokens": np.zeros(length, np.int64), **inputs})
    run = CustomRun(loss, [datum], max_seconds=5)
    weights = run.weights(0, torch.full((length,), -1.0))
    assert not weights.any()
    outcome = run.finish([np.zeros(length, np.float32)])
    assert isinstance(outcome, UserError) and outcome is run.failure
    return str(outcome)


def test_a_loss_that_fails_says_where_and_why() -> None:
    assert "data[0]" in failure(lambda logprobs: (logprobs, {}))
    assert "its loss must be a scalar tensor, and is [4]" in failure(lambda logprobs: (logprobs * 2, {}))
    assert "does not depend on logprobs" in failure(lambda logprobs: (torch.ones_like(logprobs).sum(), {}))
    assert "its gradient at position 0 of logprobs is" in failure(lambda logprobs: ((logprobs * math.inf).sum(), {}))
    assert "gather: gather failed" in failure(
        lambda logprobs, where: (logprobs.gather(0, where).sum(), {}), where=np.array([9])
    )
    words = failure(lambda logprobs, other: ((logprobs + other).sum(), {}), other=np.ones(3, np.float32))
    assert "add: operator.add failed" in words and "must match the size" in words
    assert "custom/x:sum must be a scalar" in failure(lambda logprobs: (logprobs.sum(), {"custom/x:sum": logprobs}))


def test_nothing_grows_beyond_its_bounds_and_none_of_it_is_computed_first() -> None:
    big = 40_000

    def outer(logprobs):
        return (logprobs[:, None] * logprobs[None]).sum(), {}

    def square_repeatedly(logprobs):
        return logprobs.repeat(10**9).sum(), {}

    def new(logprobs):
        return logprobs.sum() + logprobs.new_zeros(10**12).sum(), {}

    def join_often(logprobs):
        for _ in range(30):
            logprobs = torch.cat([logprobs, logprobs])
        return logprobs.sum(), {}

    def index_outer(logprobs, where):
        return logprobs[where[:, None] * where[None, :]].sum(), {}

    def powers(logprobs):
        factor = logprobs.size(0)
        for _ in range(40):
            factor = factor * factor
        return logprobs.sum() * factor, {}

    def tower(logprobs):
        return logprobs.sum() * (logprobs.size(0) ** logprobs.size(0)), {}

    def product(logprobs):
        square = logprobs.view(200, 200)
        wide = square.repeat(1, 400)
        return (wide.t() @ wide).sum(), {}

    where = np.zeros(big, np.int64)
    assert "gives 1600000000 elements" in failure(outer, length=big)
    assert "elements" in failure(square_repeatedly)
    assert "elements" in failure(new)
    assert "elements" in failure(join_often, length=1000)
    assert "elements" in failure(index_outer, length=big, where=where)
    assert "integer of more than 64 bits" in failure(powers)
    assert "exponent of 1000 is more than 64" in failure(tower, length=1000)
    assert "multiplications" in failure(product, length=big)


@pytest.mark.parametrize("target", ["torch.cat", "torch.outer", "torch.where"])
def test_oversized_intermediates_are_refused(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    function = custom_loss._FUNCTIONS[target]

    def without_memory(*args: object, **kwargs: object) -> object:
        assert all(tensor.is_meta for tensor in custom_loss._tensors((args, kwargs)))
        return function(*args, **kwargs)

    losses: dict[str, traced_losses.Loss] = {
        "torch.cat": lambda logprobs: (torch.cat([logprobs] * 900).sum(), {}),
        "torch.outer": lambda logprobs: (torch.outer(logprobs, logprobs).sum(), {}),
        "torch.where": lambda logprobs: (torch.where(logprobs[:, None] > 0, logprobs, 0.0).sum(), {}),
    }
    monkeypatch.setitem(custom_loss._FUNCTIONS, target, without_memory)
    assert "elements; at most 16777216" in failure(losses[target], length=20_000)


def test_a_slow_loss_is_stopped_unless_it_is_replayed() -> None:
    def slow(logprobs):
        for _ in range(200):
            logprobs = torch.sort(logprobs)[0] * 1.0
        return logprobs.sum(), {}

    loss = parse_as_server(trace(slow, {"logprobs": 1}))
    datum = Datum(np.zeros(20_000, np.int32), {"target_tokens": np.zeros(20_000, np.int64)})
    run = CustomRun(loss, [datum], max_seconds=0.01)
    run.weights(0, torch.randn(20_000))
    assert "it took more than 0.01 s" in str(run.failure)
    patient = CustomRun(loss, [datum], max_seconds=math.inf)
    assert patient.weights(0, torch.randn(20_000)).any() and patient.failure is None


def test_a_loss_that_writes_to_its_inputs_changes_neither_the_request_nor_the_result() -> None:
    def writes(logprobs, weights):
        weights += 1
        return (logprobs * weights).sum(), {}

    loss = parse_as_server(trace(writes, {"logprobs": 1, "weights": 1}))
    weights = np.ones(3, np.float32)
    weights.flags.writeable = False
    run = CustomRun(loss, [Datum(np.zeros(3, np.int32), {"weights": weights})])
    assert run.weights(0, torch.zeros(3)).tolist() == [-2, -2, -2]
    assert weights.tolist() == [1, 1, 1]


# Refusals.


GOOD = request(trace(*LOSSES["sequence_ratio"]))


def change_request(**changes: object) -> dict[str, Any]:
    return {**copy.deepcopy(GOOD), **changes}


def with_node(position: int, **changes: object) -> dict[str, Any]:
    body = copy.deepcopy(GOOD)
    body["graph"]["nodes"][position] = {**body["graph"]["nodes"][position], **changes}
    return body


def calling(target: str, *args: object, op: str = "call_function", **kwargs: object) -> dict[str, Any]:
    return with_node(4, op=op, target=target, args=[{"ref": "logprobs"}, *args], kwargs=kwargs)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (change_request(inputs=[]), "inputs are []; send 1 to 16 inputs, 'logprobs' first"),
    (change_request(inputs=[{"name": "weights", "rank": 1}]), "'logprobs' first"),
    (change_request(inputs=[{"name": "logprobs", "rank": 0}]), "inputs[0].rank is 0"),
    (change_request(inputs=[{"name": "logprobs", "rank": 1}, {"name": "A", "rank": 1}]), "inputs[1].name is 'A'"),
    (change_request(inputs=[{"name": "logprobs", "rank": 1}, {"name": "a", "rank": 3}]), "inputs[1].rank is 3"),
    (change_request(inputs=[{"name": "logprobs", "rank": 1}] * 2), "inputs[1].name is 'logprobs'"),
    (change_request(graph={"format": 2, "nodes": []}), "graph.format is 2"),
    (change_request(graph={"format": 1, "nodes": []}), "graph.nodes has 0 nodes"),
    (change_request(graph={"format": 1, "nodes": [3]}), "graph.nodes[0] is 3; it must be an object"),
    (with_node(0, target="weights"), "graph.nodes[0] ('logprobs') takes 'weights'; it must take 'logprobs'"),
    (with_node(0, args=[1]), "without a default"),
    (with_node(1, op="call_function", target="torch.exp", args=[1]), "begins with its 3 placeholders"),
    (with_node(4, op="placeholder", target="x", args=[]), "begins with its 3 placeholders"),
    (with_node(4, op="output"), "ends with its one output"),
    (with_node(4, op="get_attr", target="weight"), "graph.nodes[4]"),
    (with_node(4, op="call_module", target="linear"), "is a 'call_module' of 'linear'"),
    (with_node(4, name="logprobs"), "and be unique"),
    (with_node(4, name="__import__('os')"), "letters, digits and underscores"),
    (with_node(4, args=[{"ref": "output"}, 0]), "refers to 'output', which is not an earlier node"),
    (with_node(4, args=[{"ref": "nowhere"}]), "refers to 'nowhere'"),
    (with_node(4, args=[{"eval": "1"}]), "has the argument {'eval': '1'}, which is not an encoded value"),
    (with_node(4, args=[[[[[[[[[{"tuple": [1]}]]]]]]]]]), "nested more than 8"),
    (with_node(4, args=[[0] * 20_000]), "more than 16384 argument values"),
    (with_node(4, args=[]), "no positional arguments"),
    (calling("os.system"), "call_function 'os.system' is not allowed"),
    (calling("torch.load"), "call_function 'torch.load' is not allowed"),
    (calling("torch.rand_like"), "'torch.rand_like' is not allowed in a custom loss: a loss must give the same result"),
    (calling("torch.empty_like"), "its memory is not initialised"),
    (calling("os.log"), "call_function 'os.log' is not allowed in a custom loss; docs/losses.md lists"),
    (calling("add_", op="call_method"), "'add_' is not allowed in a custom loss: it writes in place; use 'add'"),
    (calling("numpy", op="call_method"), "call_method 'numpy' is not allowed"),
    (calling("__class__", op="call_method"), "call_method '__class__' is not allowed"),
    (calling("getattr", "__class__"), "getattr takes a node and one of"),
    (calling("getattr", ["shape"]), "getattr takes a node and one of"),
    (calling("getattr", "grad_fn"), "not ('grad_fn',)"),
    (calling("torch.exp", out={"ref": "logprobs"}), "has the keyword 'out', which is not allowed in a custom loss"),
    (calling("torch.exp", inplace=True), "has the keyword 'inplace', which is not allowed in a custom loss"),
    (calling("torch.sum", "cuda"), "has the text 'cuda', which is not allowed in a custom loss"),
    (calling("to", {"device": "cuda"}, op="call_method"), "the device 'cuda' must be one of cpu"),
    (calling("to", {"dtype": "complex64"}, op="call_method"), "the dtype 'complex64' must be one of bool, float32"),
    (with_node(-1, args=[{"ref": "logprobs"}]), "must return (loss, metrics)"),
    (with_node(-1, args=[{"tuple": [{"ref": "logprobs"}, {"dict": {}}, 0]}]), "must return (loss, metrics)"),
    (with_node(-1, kwargs={"metrics": {"dict": {}}}), "must return (loss, metrics)"),
    (with_node(-1, args=[{"tuple": [1.0, {"dict": {}}]}]), "must return a node as its loss"),
    (with_node(-1, args=[{"tuple": [{"ref": "logprobs"}, {"dict": {"loss:sum": {"ref": "logprobs"}}}]}]),
     "metric 'loss:sum' must be a node named custom/NAME:sum"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_a_wrong_graph_is_refused_with_its_node(body: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refusal:
        read(body)
    assert words in str(refusal.value)


def test_a_graph_of_too_many_nodes_is_refused() -> None:
    def long(logprobs):
        for _ in range(graphs.MAX_NODES):
            logprobs = logprobs + 1
        return logprobs.sum(), {}

    with pytest.raises(UserError, match="1027 nodes; it must have 1 to 1024"):
        read(request(trace(long, {"logprobs": 1})))


def test_a_graph_at_its_bounds_is_admitted() -> None:
    names = "abcdefghijklmno"[: graphs.MAX_INPUTS - 1]
    wide = lambda logprobs, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o: (logprobs.sum(), {})  # noqa: E731, E741
    read(request(trace(wide, {"logprobs": 1} | dict.fromkeys(names, 1))))
    read(calling("torch.exp", inplace=False, out=None))
    values = [list(graphs._walk((*node.args, *node.kwargs.values()))) for node in read(GOOD).nodes]
    most = graphs.MAX_ARGUMENTS - sum(map(len, values)) + len(values[4])
    read(with_node(4, args=[0] * most, kwargs={}))
    with pytest.raises(UserError, match="more than 16384 argument values"):
        read(with_node(4, args=[0] * (most + 1), kwargs={}))


REFS = st.sampled_from(["logprobs", "weights", "n2", "n3", "n4"])
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-3, 70), st.integers(-(2**63), 2**63 - 1), st.floats(),
        st.text(max_size=3),
        st.sampled_from(sorted(graphs.STRINGS)),
        st.builds(lambda name: {"ref": name}, REFS),
        st.sampled_from([{"ellipsis": True}, {"dtype": "int64"}, {"device": "cpu"}, {"float": "nan"}]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.builds(lambda items: {"tuple": items}, st.lists(inner, max_size=3)),
        st.builds(lambda items: {"slice": items}, st.lists(inner, min_size=3, max_size=3)),
    ),
    max_leaves=4,
)  # fmt: skip
CALLS = st.one_of(
    st.tuples(st.just("call_function"), st.sampled_from(sorted(graphs.FUNCTIONS))),
    st.tuples(st.just("call_method"), st.sampled_from(sorted(graphs.METHODS))),
)
KWARGS = st.dictionaries(st.sampled_from(sorted(graphs.KEYWORDS)), VALUES, max_size=2)


@pytest.mark.extended
@examples(400)
@given(
    calls=st.lists(st.tuples(CALLS, REFS, st.lists(VALUES, max_size=3), KWARGS), min_size=1, max_size=4), data=st.data()
)
def test_a_graphs_calls_raise_only_user_errors(calls: list[Any], data: st.DataObject) -> None:
    nodes = [{"op": "placeholder", "name": name, "target": name} for name in ("logprobs", "weights")]
    for index, ((op, target), first, args, kwargs) in enumerate(calls):
        name = f"n{index + 2}"
        nodes.append({"op": op, "name": name, "target": target, "args": [{"ref": first}, *args], "kwargs": kwargs})
    output = {"tuple": [{"ref": nodes[-1]["name"]}, {"dict": {"custom/x:sum": {"ref": nodes[-1]["name"]}}}]}
    nodes.append({"op": "output", "name": "output", "target": "output", "args": [output]})
    body = {
        "name": "fuzz",
        "inputs": [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}],
        "graph": {"nodes": nodes},
    }
    try:
        loss = create_custom_loss_of(body).loss
        graphs.check_graph(loss)
    except UserError:
        return
    length = data.draw(st.sampled_from([1, 3]))
    datum = Datum(np.zeros(length, np.int32), {"weights": np.linspace(-1, 1, length, dtype=np.float32)})
    run = CustomRun(loss, [datum])
    run.weights(0, torch.linspace(-3, -1, length))
    outcome = run.finish([np.full(length, -1, np.float32)])
    assert isinstance(outcome, dict | UserError)


# In a packed step.


@pytest.fixture(scope="module")
def backend() -> TorchBackend:
    (shape,) = resolve(())
    return TorchBackend(shape, device="cpu", max_tokens_per_microbatch=40)


def pass_of(model_id: str, fn: traced_losses.Loss, data: list[Datum], ranks: dict[str, int]) -> Pass:
    loss = parse_as_server(trace(fn, ranks))
    return Pass(f"r-{model_id}", model_id, tuple(data), "custom", {"loss_id": "l"}, False, loss)


def cross_entropy(model_id: str, data: list[Datum]) -> Pass:
    weighted = [Datum(d.tokens_N, {**d.inputs, "weights": np.ones(len(d.tokens_N), np.float32)}) for d in data]
    return Pass(f"ce-{model_id}", model_id, tuple(weighted), "cross_entropy", {}, False)


def gradients(
    backend: TorchBackend, *passes: Pass
) -> tuple[list[PassResult | UserError], dict[str, torch.Tensor | None]]:
    """Return a step's results and each model's gradient, with fresh and trained adapters."""
    models = sorted({pass_.model_id for pass_ in passes})
    for seed, model_id in enumerate(models):
        backend.create_model(model_id, LoraSpec(4, seed=seed))
        flat_P = backend._models[model_id].adapter.flat_P
        flat_P += 0.01 * torch.randn(flat_P.shape, generator=torch.Generator().manual_seed(seed))
    results = run_to_end(backend.run_passes(passes))
    return list(results), {model_id: backend._models[model_id].gradient_P for model_id in models}


def test_a_failing_loss_does_not_change_other_passes(backend: TorchBackend) -> None:
    rng = np.random.default_rng(0)
    fn, ranks = LOSSES["weighted"]
    good = [arrays(traced_losses.datum(rng, 12, 500, ranks)) for _ in range(3)]
    bad = [*good[:2], Datum(good[2].tokens_N, {**good[2].inputs, "weights": np.full(12, np.nan, np.float32)})]
    other = pass_of("b", fn, good, ranks)
    good_pass = cross_entropy("a", good)
    results, gradients_of_models = gradients(backend, pass_of("a", fn, bad, ranks), other, good_pass)
    assert isinstance(results[0], UserError) and "failed at data[2]" in str(results[0])
    _, expected = gradients(backend, good_pass, other)
    for model_id in ("a", "b"):
        assert gradients_of_models[model_id] is not None and gradients_of_models[model_id].norm() > 0
        torch.testing.assert_close(gradients_of_models[model_id], expected[model_id], rtol=1e-5, atol=1e-6)
    _, lone_gradients = gradients(backend, pass_of("a", fn, bad, ranks))
    assert lone_gradients["a"] is None


def test_a_custom_loss_equals_the_same_loss_of_ours_in_one_step_with_it(backend: TorchBackend) -> None:
    rng = np.random.default_rng(1)
    fn, ranks = LOSSES["weighted"]
    data = [arrays(traced_losses.datum(rng, n, 500, ranks)) for n in (5, 23, 1)]
    ours = Pass("x", "b", tuple(data), "cross_entropy", {}, False)
    (first, _), _ = gradients(backend, pass_of("a", fn, data, ranks), ours)
    _, custom_gradients = gradients(backend, pass_of("b", fn, data, ranks))
    (second,), named_gradients = gradients(backend, ours)
    assert isinstance(first, PassResult) and isinstance(second, PassResult)
    assert custom_gradients["b"] is not None
    torch.testing.assert_close(custom_gradients["b"], named_gradients["b"], rtol=1e-5, atol=1e-6)
    assert first.metrics["tokens:sum"] == 29
    forward = replace(pass_of("b", fn, data, ranks), forward_only=True)
    (scored,), untouched = gradients(backend, forward)
    assert isinstance(scored, PassResult) and untouched["b"] is None
    assert scored.metrics["loss:sum"] == pytest.approx(second.metrics["loss:sum"], rel=1e-5)


# Through the SDK, on the server and in the client.


@pytest.mark.parametrize("name", LOSSES)
def test_data_that_begin_alike_have_the_gradients_of_separate_ones(backend: TorchBackend, name: str) -> None:
    """Each datum's loss sees the log probabilities of its own sequence, shared rows included."""
    rng = np.random.default_rng(5)
    fn, ranks = LOSSES[name]
    data = [arrays(traced_losses.datum(rng, length, 100, ranks)) for length in (14, 11, 17)]
    beginning = data[0].tokens_N[:9]
    data = [Datum(np.concatenate([beginning, datum.tokens_N[9:]]), datum.inputs) for datum in data]
    outcomes = []
    for min_rows in (0, 4):
        backend._trainer._min_shared_rows = min_rows
        try:
            outcomes.append(gradients(backend, pass_of(name, fn, data, ranks)))
        finally:
            backend._trainer._min_shared_rows = MIN_SHARED_ROWS
    ((apart,), apart_P), ((together,), together_P) = outcomes
    assert isinstance(apart, PassResult) and isinstance(together, PassResult)
    assert (apart.num_rows, together.num_rows) == (42, 9 + 5 + 2 + 8)
    assert together.metrics == pytest.approx(apart.metrics, rel=1e-4, abs=1e-4)
    ours_P, expected_P = together_P[name], apart_P[name]
    assert ours_P is not None and expected_P is not None
    assert (ours_P - expected_P).norm() <= 1e-4 * expected_P.norm()


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.covers(
    "ServiceClient.create_custom_loss", "TrainingClient.forward_backward_custom", "POST /create_custom_loss"
)
def test_the_server_and_the_client_compute_the_same(nano_service: tinker.ServiceClient, name: str) -> None:
    rng = np.random.default_rng(3)
    fn, ranks = LOSSES[name]
    handle = nano_service.create_custom_loss(fn, ranks).result()  # type: ignore[arg-type]
    assert handle.loss_id is not None
    model = nano_service.create_lora_training_client("tinsmith/nano", rank=4, seed=7).result()
    data = [traced_losses.datum(rng, n, 500, ranks) for n in (9, 30, 4)]
    steps = []
    for loss in (handle, in_client(handle)):
        result = model.forward_backward_custom(data, loss).result()
        stepped = model.optim_step(tinker.AdamParams(learning_rate=0.0)).result()
        assert stepped.metrics is not None
        steps.append((result, stepped.metrics["grad_norm"]))
    (server, server_norm), (client, client_norm) = steps
    assert server_norm == pytest.approx(client_norm, rel=1e-4) and server_norm > 0
    assert client.metrics.pop("surrogate_loss:sum") is not None
    assert server.metrics == pytest.approx(client.metrics, rel=1e-5, abs=1e-5)
    for server_output, client_output in zip(server.loss_fn_outputs, client.loss_fn_outputs, strict=True):
        assert server_output["logprobs"].shape == client_output["logprobs"].shape
        np.testing.assert_allclose(
            server_output["logprobs"].to_numpy(), client_output["logprobs"].to_numpy(), atol=1e-5
        )


def test_a_loss_that_the_server_does_not_allow_is_a_user_error_that_names_it(
    nano_service: tinker.ServiceClient,
) -> None:
    def noisy(logprobs):
        return (logprobs * torch.rand_like(logprobs)).sum(), {}

    with pytest.raises(tinker.RequestFailedError) as failed:
        nano_service.create_custom_loss(noisy, {"logprobs": 1}).result()
    assert "'torch.rand_like' is not allowed" in str(failed.value)


def test_a_loss_of_another_session_is_unknown(nano_service: tinker.ServiceClient, nano_server: LiveServer) -> None:
    fn, ranks = LOSSES["weighted"]
    handle = nano_service.create_custom_loss(fn, ranks).result()  # type: ignore[arg-type]
    data = [traced_losses.datum(np.random.default_rng(0), 5, 500, ranks)]
    with tinker.ServiceClient(base_url=nano_server.url, api_key="tml-test") as other:
        model = other.create_lora_training_client("tinsmith/nano", rank=4).result()
        with pytest.raises(tinker.RequestFailedError, match="is not a custom loss of session"):
            model.forward_backward(data, "custom", {"loss_id": str(handle.loss_id)}).result()
        with pytest.raises(tinker.RequestFailedError, match="takes one text, 'loss_id'"):
            model.forward_backward(data, "custom").result()
        with pytest.raises(tinker.RequestFailedError, match="weights'\\] is missing"):
            own_loss = other.create_custom_loss(fn, ranks).result()  # type: ignore[arg-type]
            bare = [tinker.Datum(data[0].model_input, {"target_tokens": data[0].loss_fn_inputs["target_tokens"]})]
            model.forward_backward(bare, "custom", {"loss_id": str(own_loss.loss_id)}).result()
