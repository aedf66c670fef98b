# SPDX-License-Identifier: Apache-2.0
"""`--config FILE`."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.fields import hashed_key
from quire.errors import ConfigError
from tests.entrypoints.cli.test_options import configs


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "serve.yaml"


def test_values_of_every_kind(yaml_file: Path) -> None:
    yaml_file.write_text(
        "model: from-file\n"
        "max-num-seqs: 7\n"
        "max_model_len: 4K\n"
        "gpu_memory_utilization: 0.5\n"
        "enable-prefix-caching: false\n"
        "skip-tokenizer-init: true\n"
        "hf-overrides: {a: 1}\n"
        "served-model-name: [one, two]\n"
        "api-key: secret\n"
        "revision: null\n"
        "allowed-origins: null\n"
        "port: 9000\n"
    )
    engine, server = configs("--config", str(yaml_file))
    assert engine.model.model == "from-file"
    assert engine.scheduler.max_num_seqs == 7
    assert engine.model.max_model_len == 4096
    assert engine.cache.gpu_memory_utilization == 0.5
    assert engine.cache.enable_prefix_caching is False
    assert engine.model.skip_tokenizer_init is True
    assert engine.model.hf_overrides == {"a": 1}
    assert engine.model.served_model_name == ("one", "two")
    assert engine.model.revision is None
    assert server.allowed_origins == ()
    assert (server.api_key, server.port) == ((hashed_key("secret"),), 9000)


@pytest.mark.parametrize("config_first", [True, False])
def test_command_line_wins_in_any_order(yaml_file: Path, config_first: bool) -> None:
    yaml_file.write_text("seed: 1\nport: 9000\nenable-prefix-caching: false\nserved-model-name: [a]\n")
    flags = ["--seed", "2", "--enable-prefix-caching", "--served-model-name", "b"]
    file = ["--config", str(yaml_file)]
    engine, server = configs(*(file + flags if config_first else flags + file))
    assert engine.model.seed == 2
    assert engine.cache.enable_prefix_caching is True
    assert engine.model.served_model_name == ("b",)
    assert server.port == 9000


def test_empty_file_changes_nothing(yaml_file: Path) -> None:
    yaml_file.write_text("# nothing\n")
    assert configs("--config", str(yaml_file)) == configs()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max-num-seq: 3", "unknown key 'max-num-seq'; did you mean 'max_num_seqs'"),
        ("config: other.yaml", "unknown key 'config'"),
        ("help: true", "unknown key 'help'"),
        ("3: 4", "unknown key 3"),
        ("seed: 1\nmax-num-seqs: 2\nmax_num_seqs: 3", "'max_num_seqs' is given twice"),
        ("- seed", "must hold a mapping of flags to values, not a list"),
        ("seed: [", "is not YAML"),
        ("seed: !!python/object/apply:os.getcwd []", "is not YAML"),
        (b"\xff\xfe\xfa", "is not YAML"),
    ],
)
def test_errors_name_the_file(yaml_file: Path, content: str | bytes, message: str) -> None:
    yaml_file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError) as error:
        configs("--config", str(yaml_file))
    assert message in str(error.value)
    assert str(yaml_file) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        configs("--config", str(tmp_path / "none.yaml"))


def test_value_out_of_range(yaml_file: Path) -> None:
    yaml_file.write_text("block-size: 0")
    with pytest.raises(ConfigError, match="--block-size must be at least 1"):
        configs("--config", str(yaml_file))
