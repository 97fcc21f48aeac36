"""The types of a data set's methods: a Dataset, or with an output a Job. Pyright checks this file."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

from tinsmith import batch
from tinsmith.batch.client.dataset import Dataset
from tinsmith.batch.client.job import Job


def same(row: dict[str, object]) -> dict[str, object]:
    return row


def test_a_chain_is_a_dataset_and_an_output_makes_it_a_job() -> None:
    data = batch.from_items([{"n": 1}])
    chained = data.map(same).filter(bool, batch_size=4).flat_map(lambda row: [row]).map_batches(same, concurrency=2)
    assert_type(chained, Dataset)
    chained._forgotten = False  # nothing is to be run
    assert isinstance(chained, Dataset)
    if TYPE_CHECKING:
        output = batch.JsonWriter("out.jsonl")
        assert_type(data.map(same, "local", 4, output), Job)
        assert_type(data.map(same, batch_size=4, output=[output], stream=False, num_cpus=2), Job)
        assert_type(data.map(batch.Sample("model", messages="chat"), output=output), Job)
        assert_type(data.map_batches(same, output=output, batch_format="numpy"), Job)
        assert_type(data.filter(bool, output=output), Job)
        assert_type(data.flat_map(same, output=output, requests_per_minute=60), Job)
        assert_type(data.sample("model", output=output, messages="chat"), Job)
        assert_type(data.sample("model", messages="chat"), Dataset)
        assert_type(chained.write_json("out.jsonl"), Job)
