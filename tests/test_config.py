"""Configuration: how it is read, and every contradiction that is refused."""

from __future__ import annotations

import argparse
import dataclasses
import types
from pathlib import Path
from typing import Any

import pytest
from absl import flags as absl_flags
from hypothesis import given, settings
from hypothesis import strategies as st

from mtcheckpoint._config_rules import RULES
from mtcheckpoint.config import CheckpointConfig
from mtcheckpoint.errors import ConfigError

MINUTES = "multi_tier_checkpointing_backup_interval_minutes"
STEPS = "multi_tier_checkpointing_backup_interval_steps"
MULTI_TIER: dict[str, Any] = {
    "enable_multi_tier_checkpointing": True,
    "local_checkpoint_directory": "/ram",
    "local_checkpoint_period": 5,
    MINUTES: 30,
    "run_name": "train-a",
}

# What breaks the rules: changes to a sound multi-tier configuration, and the fields to be named.
CONTRADICTIONS: list[tuple[dict[str, Any], set[str]]] = [
    ({"checkpoint_period": -1}, {"checkpoint_period"}),
    ({"max_num_checkpoints_to_keep": 0}, {"max_num_checkpoints_to_keep"}),
    ({"max_num_checkpoints_to_keep": -1}, {"max_num_checkpoints_to_keep"}),
    ({"checkpoint_storage_concurrent_gb": 0}, {"checkpoint_storage_concurrent_gb"}),
    (
        {"checkpoint_storage_target_data_file_size_bytes": 0},
        {"checkpoint_storage_target_data_file_size_bytes"},
    ),
    (
        {"jax_distributed_initialization_timeout": 0},
        {"jax_distributed_initialization_timeout"},
    ),
    ({"peers_per_node": 0}, {"peers_per_node"}),
    ({"save_error_budget": -1}, {"save_error_budget"}),
    ({"timeout_secs": 0}, {"timeout_secs"}),
    ({"timeout_secs": float("nan")}, {"timeout_secs"}),
    ({"timeout_secs": float("inf")}, {"timeout_secs"}),
    (
        {"minimum_interval_secs": -1, "enable_continuous_checkpointing": True},
        {"minimum_interval_secs"},
    ),
    ({"backup_root": "bucket/folder"}, {"backup_root"}),
    ({"local_checkpoint_directory": "ram"}, {"local_checkpoint_directory"}),
    (
        {"enable_multi_tier_checkpointing": False, "checkpoint_period": 0},
        {"checkpoint_period", "enable_continuous_checkpointing"},
    ),
    ({"minimum_interval_secs": 5.0}, {"minimum_interval_secs", "enable_continuous_checkpointing"}),
    ({"on_save_error": "warn", "save_error_budget": 0}, {"on_save_error", "save_error_budget"}),
    (
        {"local_checkpoint_directory": ""},
        {"enable_multi_tier_checkpointing", "local_checkpoint_directory"},
    ),
    ({"run_name": ""}, {"enable_multi_tier_checkpointing", "run_name"}),
    ({"run_name": "a_b"}, {"enable_multi_tier_checkpointing", "run_name"}),
    (
        {"local_checkpoint_period": 0},
        {"local_checkpoint_period", "enable_continuous_checkpointing"},
    ),
    (
        {"local_checkpoint_period": -1},
        {"local_checkpoint_period", "enable_continuous_checkpointing"},
    ),
    ({MINUTES: None}, {MINUTES, STEPS}),
    ({MINUTES: 0, STEPS: -1}, {MINUTES, STEPS}),
    ({STEPS: 50}, {MINUTES, STEPS}),
    ({MINUTES: None, STEPS: 4}, {STEPS, "local_checkpoint_period"}),
    ({"enable_replicator": False}, {"enable_replicator", "max_num_checkpoints_to_keep"}),
    ({"backup_root": "/ram/backup"}, {"backup_root", "local_checkpoint_directory"}),
    ({"backup_root": "file:///ram"}, {"backup_root", "local_checkpoint_directory"}),
    (
        {"replication": "copies", "mtc_data_parallelism": 2},
        {"replication", "mtc_data_parallelism"},
    ),
    (
        {"replication": "replicas", "mtc_data_parallelism": 1},
        {"replication", "mtc_data_parallelism"},
    ),
    ({"replication": "replicas", "num_slices": 1}, {"replication", "num_slices"}),
    ({"replication": "replicas", "peers_per_node": 1}, {"replication", "peers_per_node"}),
    ({"mtc_data_parallelism": 3, "num_slices": 2}, {"mtc_data_parallelism", "num_slices"}),
]


def multi_tier(**changes: Any) -> CheckpointConfig:
    return CheckpointConfig(**{**MULTI_TIER, **changes})


# Contradictions.


@pytest.mark.parametrize(("changes", "fields"), CONTRADICTIONS, ids=lambda value: str(value)[:70])
def test_contradiction_is_refused_and_names_its_fields(
    changes: dict[str, Any], fields: set[str]
) -> None:
    with pytest.raises(ConfigError) as fault:
        multi_tier(**changes)
    assert set(fault.value.fields) == fields
    assert all(name in str(fault.value) for name in fields)
    assert isinstance(fault.value, ValueError)


def test_every_rule_is_broken_by_one_of_the_contradictions() -> None:
    tested = [frozenset(fields) for _, fields in CONTRADICTIONS]
    assert {frozenset(rule.fields) for rule in RULES} == set(tested)


@pytest.mark.parametrize(("changes", "fields"), CONTRADICTIONS, ids=lambda value: str(value)[:70])
def test_with_checkpointing_off_nothing_is_refused(
    changes: dict[str, Any], fields: set[str]
) -> None:
    assert not multi_tier(enable_checkpointing=False, **changes).enable_checkpointing


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"local_checkpoint_period": 0, "enable_continuous_checkpointing": True},
        {"local_checkpoint_period": 0, "local_checkpoint_steps": [3, 9]},
        {MINUTES: 0, STEPS: 5},
        {MINUTES: -1, STEPS: 5},
        {MINUTES: None, "enable_replicator": False, "max_num_checkpoints_to_keep": 1},
        {"enable_continuous_checkpointing": True, "minimum_interval_secs": 1},
        {"backup_root": "gs://bucket"},
        {"backup_root": "/backup"},
        {"backup_root": "/ramshackle"},
        {"backup_root": "memory://x"},
        {"replication": "replicas"},
        {"mtc_data_parallelism": 4, "num_slices": 2},
        {"mtc_data_parallelism": 2, "num_slices": 4},
        {"on_save_error": "warn"},
        {"checkpoint_period": 0},
    ],
    ids=str,
)
def test_sound_configurations(changes: dict[str, Any]) -> None:
    multi_tier(**changes)


# Types and spellings.


@pytest.mark.parametrize(
    ("field", "value", "expected", "found"),
    [
        ("enable_checkpointing", 1, "bool", "int"),
        ("enable_checkpointing", "true", "bool", "str"),
        ("checkpoint_period", "10", "int", "str"),
        ("checkpoint_period", True, "int", "bool"),
        ("checkpoint_period", 1.5, "int", "float"),
        ("checkpoint_period", None, "int", "NoneType"),
        ("max_num_checkpoints_to_keep", 2.0, "int or None", "float"),
        ("timeout_secs", "300", "float", "str"),
        ("run_name", 7, "str", "int"),
        ("verify", "yes", "'full' or 'size' or 'off'", "str"),
        ("replication", None, "'auto' or 'replicas' or 'copies'", "NoneType"),
        ("local_checkpoint_steps", 3, "a list of int", "int"),
        ("local_checkpoint_steps", "3", "a list of int", "str"),
        ("local_checkpoint_period", False, "int", "bool"),
        ("num_slices", "2", "int or None", "str"),
    ],
)
def test_wrong_types_name_field_expected_and_found(
    field: str, value: Any, expected: str, found: str
) -> None:
    with pytest.raises(ConfigError) as fault:
        CheckpointConfig(**{field: value})
    assert fault.value.fields == (field,)
    assert str(fault.value) == f"{field}: expected {expected}, found {value!r} ({found})"


@pytest.mark.parametrize("steps", [[-1], ["3"], [True], [1.0]], ids=str)
def test_steps_must_be_steps(steps: list[Any]) -> None:
    with pytest.raises(ConfigError, match="local_checkpoint_steps: expected steps"):
        CheckpointConfig(local_checkpoint_steps=steps)  # type: ignore[arg-type]


def test_spellings_of_not_set() -> None:
    for value in (None, 0, -1, ""):
        config = CheckpointConfig(
            **{
                "num_slices": value,
                "mtc_data_parallelism": value,
                "local_checkpoint_period": value,
                MINUTES: value,
                STEPS: value,
            }
        )
        assert config == CheckpointConfig()
    assert CheckpointConfig(run_name=None, backup_root="") == CheckpointConfig()  # type: ignore[arg-type]


def test_steps_are_sorted_and_paths_are_accepted(tmp_path: Path) -> None:
    config = CheckpointConfig(
        local_checkpoint_steps=[9, 3, 9],  # type: ignore[arg-type]
        local_checkpoint_directory=tmp_path,  # type: ignore[arg-type]
    )
    assert config.local_checkpoint_steps == (3, 9)
    assert config.local_checkpoint_directory == str(tmp_path)


@pytest.mark.parametrize("base", ["gs://bucket/out", "gs://bucket/out/"])
def test_checkpoint_dir_is_derived(base: str) -> None:
    config = CheckpointConfig(base_output_directory=base, run_name="r1")
    assert config.checkpoint_dir == "gs://bucket/out/r1/checkpoints"
    assert CheckpointConfig(base_output_directory=base).checkpoint_dir == ""
    given = CheckpointConfig(base_output_directory=base, run_name="r1", checkpoint_dir="/x")
    assert given.checkpoint_dir == "/x"


def test_frozen_hashable_and_short() -> None:
    config = multi_tier()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run_name = "b"  # type: ignore[misc]
    assert hash(config) == hash(multi_tier())
    assert repr(CheckpointConfig()) == "CheckpointConfig()"
    assert repr(config).startswith("CheckpointConfig(enable_multi_tier_checkpointing=True, ")
    assert "timeout_secs" not in config.describe()
    assert dataclasses.replace(config, timeout_secs=5.0).timeout_secs == 5.0


# From flags.


class RaisesOnUnknownNames:
    """Like a MaxText config: ValueError for unknown names, the mapping as get_keys()."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["_values"] = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise ValueError(f"Requested key {name}, not in config") from None

    def get_keys(self) -> dict[str, Any]:
        return self.__dict__["_values"]  # type: ignore[no-any-return]


def parsed_absl_flags(values: dict[str, Any]) -> absl_flags.FlagValues:
    holder = absl_flags.FlagValues()
    for name, value in values.items():
        absl_flags.DEFINE_string(name, str(value), "", flag_values=holder)
    holder(["program"])
    return holder


WITH_OTHERS = {**MULTI_TIER, "learning_rate": 3e-4, "hardware": "tpu"}


@pytest.mark.parametrize(
    "flags",
    [
        WITH_OTHERS,
        types.MappingProxyType(WITH_OTHERS),
        argparse.Namespace(**WITH_OTHERS),
        types.SimpleNamespace(**WITH_OTHERS),
        RaisesOnUnknownNames(**WITH_OTHERS),
        parsed_absl_flags(WITH_OTHERS),
        {name: str(value) for name, value in WITH_OTHERS.items()},
    ],
    ids=["dict", "mapping", "namespace", "object", "maxtext", "absl", "text"],
)
def test_from_flags_takes_what_it_knows(flags: Any) -> None:
    assert CheckpointConfig.from_flags(flags) == multi_tier()


def test_from_flags_without_any() -> None:
    assert CheckpointConfig.from_flags({}) == CheckpointConfig()
    assert CheckpointConfig.from_flags(object()) == CheckpointConfig()


def test_from_flags_does_not_take_other_errors_for_missing() -> None:
    unparsed = absl_flags.FlagValues()
    absl_flags.DEFINE_string("run_name", "a", "", flag_values=unparsed)
    with pytest.raises(absl_flags.UnparsedFlagAccessError):
        CheckpointConfig.from_flags(unparsed)


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("enable_checkpointing", "false", False),
        ("enable_checkpointing", "False", False),
        ("enable_checkpointing", "0", False),
        ("enable_autocheckpoint", "1", True),
        ("enable_autocheckpoint", " TRUE ", True),
        ("checkpoint_period", "12", 12),
        ("max_num_checkpoints_to_keep", "", None),
        ("max_num_checkpoints_to_keep", "None", None),
        ("max_num_checkpoints_to_keep", "3", 3),
        ("local_checkpoint_period", "", 0),
        ("timeout_secs", "2.5", 2.5),
        ("local_checkpoint_steps", "9,3", (3, 9)),
        ("local_checkpoint_steps", "[1, 2]", (1, 2)),
        ("local_checkpoint_steps", "", ()),
        ("verify", "size", "size"),
        ("run_name", "12", "12"),
        ("backup_root", "", None),
    ],
)
def test_from_flags_reads_text_as_the_fields_type(field: str, text: str, value: Any) -> None:
    assert getattr(CheckpointConfig.from_flags({field: text}), field) == value


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("enable_checkpointing", "maybe"),
        ("checkpoint_period", "1e3"),
        ("checkpoint_period", "1.0"),
        ("checkpoint_period", ""),
        ("timeout_secs", "soon"),
        ("local_checkpoint_steps", "1,x"),
        ("verify", "FULL"),
    ],
)
def test_from_flags_refuses_text_that_is_not_of_the_type(field: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: expected") as fault:
        CheckpointConfig.from_flags({field: text})
    assert fault.value.fields == (field,)


NAMES = [field.name for field in dataclasses.fields(CheckpointConfig)]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text("aA01-/. \n", max_size=5),
    st.sampled_from(["true", "0", "-1", "auto", "full", "None", "gs://b", "/x", "train-a"]),
    st.lists(st.integers(), max_size=3),
)


def configuration_or_fault(flags: dict[str, Any]) -> CheckpointConfig | ConfigError:
    try:
        return CheckpointConfig.from_flags(flags)
    except ConfigError as fault:
        return fault


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5))
def test_any_flags_give_a_configuration_or_a_config_error(flags: dict[str, Any]) -> None:
    outcome = configuration_or_fault(flags)
    if isinstance(outcome, ConfigError):
        assert outcome.fields
        assert set(outcome.fields) <= set(NAMES)
    else:
        assert CheckpointConfig.from_flags(dataclasses.asdict(outcome)) == outcome


# From YAML.


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_from_yaml(tmp_path: Path) -> None:
    lines = [f"{name}: {value}" for name, value in WITH_OTHERS.items()]
    lines += ["max_num_checkpoints_to_keep: None", f"{STEPS}: -1", 'backup_root: ""']
    assert CheckpointConfig.from_yaml(write(tmp_path / "c.yml", "\n".join(lines))) == multi_tier()


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "found an empty file"),
        ("# nothing\n", 1, "found an empty file"),
        ("- a\n", 1, "expected a mapping"),
        ("a", 1, "expected a mapping"),
        ("run_name: a\n  b: c: d\n", 2, "not valid YAML"),
        ("run_name: [\n", 2, "not valid YAML"),
        ("run_name: a\ntimeout_secs: soon\n", 2, "timeout_secs: expected float"),
        ('run_name: a\n\nenable_checkpointing: "true"\n', 3, "enable_checkpointing: expected bool"),
        ("on_save_error: warn\nsave_error_budget: 0\n", 2, "save_error_budget=0"),
    ],
)
def test_from_yaml_names_path_and_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    path = write(tmp_path / "c.yml", text)
    with pytest.raises(ConfigError) as fault:
        CheckpointConfig.from_yaml(path)
    assert str(fault.value).startswith(f"{path}:{line}: ")
    assert message in str(fault.value)


def test_from_yaml_of_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.yml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            CheckpointConfig.from_yaml(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary:1: cannot be read"):
        CheckpointConfig.from_yaml(tmp_path / "binary")
