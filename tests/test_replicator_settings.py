"""The strict reading of replicator.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mtcheckpoint._handshake.files import yaml_text
from mtcheckpoint._replicator.settings import RunSettings, parse_settings
from mtcheckpoint.errors import ReplicatorConfigError

GOOD = {
    "job-name": "job-a",
    "framework": "orbax",
    "node-rank": 1,
    "nodes": 4,
    "peer-ranks": [0, 2],
    "backup-interval-minutes": 30,
}
ABSENT = object()


def text_with(**changes: object) -> str:
    values = {**GOOD, **{key.replace("_", "-"): value for key, value in changes.items()}}
    return yaml_text({key: value for key, value in values.items() if value is not ABSENT})


def test_a_complete_file_is_read() -> None:
    assert parse_settings(text_with(assume_data_parallelism=2)) == RunSettings(
        job_name="job-a",
        framework="orbax",
        node_rank=1,
        nodes=4,
        peer_ranks=(0, 2),
        peers_per_node=None,
        replicas=2,
        backup_interval_minutes=30,
        backup_interval_steps=None,
    )


def test_coordinator_addresses_are_accepted_and_ignored() -> None:
    assert parse_settings(text_with(master_port=4242, master="10.0.0.1")) == parse_settings(
        text_with()
    )


def test_variables_are_expanded_and_digits_become_integers() -> None:
    text = text_with(job_name="job-$KIND", nodes="4", node_rank="${RANK}", peer_ranks=["$RANK0"])
    settings = parse_settings(text, {"KIND": "x", "RANK": "3", "RANK0": "0"})
    assert (settings.job_name, settings.node_rank, settings.peer_ranks) == ("job-x", 3, (0,))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"surprise": 1}, "surprise"),
        ({"job_name": ABSENT}, "job-name"),
        ({"nodes": ABSENT}, "nodes"),
        ({"job_name": "$UNSET"}, "job-name"),
        ({"framework": "pytorch"}, "framework"),
        ({"framework": "tensorflow"}, "framework"),
        ({"nodes": 0}, "nodes"),
        ({"nodes": True}, "nodes"),
        ({"nodes": 4.0}, "nodes"),
        ({"node_rank": 4}, "node-rank"),
        ({"node_rank": -1}, "node-rank"),
        ({"node_rank": "one"}, "node-rank"),
        ({"peer_ranks": [4]}, "peer-ranks"),
        ({"peer_ranks": [1]}, "peer-ranks"),
        ({"peer_ranks": [0, 0]}, "peer-ranks"),
        ({"peer_ranks": 0}, "peer-ranks"),
        ({"peer_ranks": ["a"]}, "peer-ranks"),
        ({"peer_ranks": ABSENT}, "peer-ranks"),
        ({"peers_per_node": 1}, "peer-ranks"),
        ({"peer_ranks": ABSENT, "peers_per_node": 4}, "peers-per-node"),
        ({"peer_ranks": ABSENT, "peers_per_node": -1}, "peers-per-node"),
        ({"backup_interval_minutes": ABSENT}, "backup-interval-minutes"),
        ({"backup_interval_steps": 10}, "backup-interval-minutes"),
        ({"backup_interval_minutes": 0}, "backup-interval-minutes"),
        ({"backup_interval_minutes": 0.5}, "backup-interval-minutes"),
        ({"backup_interval_minutes": ABSENT, "backup_interval_steps": 0}, "backup-interval-steps"),
        ({"assume_data_parallelism": 3}, "assume-data-parallelism"),
        ({"assume_data_parallelism": 0}, "assume-data-parallelism"),
        ({"workers_per_node": 8}, "workers-per-node"),
    ],
)
def test_what_contradicts_is_refused_by_name(changes: dict[str, object], key: str) -> None:
    with pytest.raises(ReplicatorConfigError, match=key) as caught:
        parse_settings(text_with(**changes), {})
    assert caught.value.key == key


@pytest.mark.parametrize("text", ["[1, 2]", "just a word", "a: b: c", "null"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ReplicatorConfigError):
        parse_settings(text)


JOB_NAMES = yaml.safe_load((Path(__file__).parent / "cases" / "job_names.yaml").read_text())


@pytest.mark.parametrize("name", JOB_NAMES["good"])
def test_good_job_names_come_back_unchanged(name: str) -> None:
    assert parse_settings(text_with(job_name=name), {}).job_name == name


@pytest.mark.parametrize("name", JOB_NAMES["bad"])
def test_bad_job_names_are_refused(name: str) -> None:
    with pytest.raises(ReplicatorConfigError, match="job-name"):
        parse_settings(text_with(job_name=name), {})
