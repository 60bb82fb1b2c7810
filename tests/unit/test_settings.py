"""A service's settings: one schema for options, variables and the file, and who goes first."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from serve_configs import note_configs

from legato.cluster.autoscale_options import AutoscaleOptions, PoolRange
from legato.cluster.cli import main as cli
from legato.cluster.cli import yaml_settings
from legato.cluster.cli.nearest import did_you_mean
from legato.cluster.cli.serve_settings import (
    ServeSettings,
    form_of,
    load,
    value_text,
)
from legato.cluster.cli.setting_error import SettingError
from legato.cluster.cli.variables import OTHER_VARIABLES, check_variables, variable_of
from legato.cluster.config import EngineOptions, RouterOptions, ServiceConfig
from legato.cluster.resource_demand import parse_demand
from legato.cluster.router_ports import default_http_port

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LEGATO_"):
            monkeypatch.delenv(name)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        Path("legato.yaml").write_text(text)
        return Path("legato.yaml")

    monkeypatch.chdir(tmp_path)
    return write


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["legato", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def refusal(options: dict[str, str], path: Path | None = None) -> str:
    with pytest.raises(SettingError) as caught:
        load(options, path)
    return f"{caught.value.name}: {caught.value}"


def test_defaults_are_those_of_the_configs() -> None:
    loaded = load({"model": "m"}, None)
    router = RouterOptions(http_port=default_http_port(RouterOptions.port))
    assert loaded.config == ServiceConfig(model="m", engine=EngineOptions(), router=router)
    assert loaded.places == {"model": "--model"}


def test_options_go_before_variables_before_the_file_before_defaults(
    monkeypatch: pytest.MonkeyPatch, written: Callable[[str], Path]
) -> None:
    path = written("# mine\nmodel: from-file\nprefill: 2\ndecode: 3\nport: 1\nkv_lane: ~\n")
    monkeypatch.setenv("LEGATO_DECODE", "4")
    monkeypatch.setenv("LEGATO_PORT", "2")
    monkeypatch.setenv("LEGATO_KV_WIRE", "")  # as if it were not there
    loaded = load({"port": "3"}, path)
    settings = loaded.settings
    assert (settings.model, settings.prefill, settings.decode) == ("from-file", 2, 4)
    assert (settings.port, settings.routers, settings.kv_wire) == (3, 1, "same")
    assert loaded.places == {
        "model": "model (legato.yaml:2)",
        "prefill": "prefill (legato.yaml:3)",
        "decode": "LEGATO_DECODE",
        "port": "--port",
    }


def test_a_file_may_hold_everything(written: Callable[[str], Path]) -> None:
    path = written(
        """
model: ./a-model
threads: 010
deterministic: yes
prefix_cache: off
kv_memory: 0.6
swap_memory: 0
admission_risk: .25
device: cuda:1
ray_address: 127.0.0.1:6379
autoscale: {prefill: 1..4, decode: 2}
decode: 2
ttft_slo: 2s
prefill_resources: CPU=4,label:zone=in(a,b)
decode_resources:
  GPU: 0
  memory: 16GB
  label:zone: "!b"
"""
    )
    config = load({}, path).config
    assert config.engine == EngineOptions(
        num_threads=10,
        deterministic=True,
        prefix_cache=False,
        kv_memory_fraction=0.6,
        swap_memory_bytes=0,
        admission_risk=0.25,
        device="cuda:1",
    )
    assert config.autoscale == AutoscaleOptions(PoolRange(1, 4), PoolRange(2, 2), ttft_slo_s=2.0)
    assert config.router.reports_load
    assert config.prefill_resources == parse_demand("CPU=4,label:zone=in(a,b)")
    assert config.decode_resources == parse_demand("GPU=0,memory=16GB,label:zone=!b")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kv_wire: bf16", "kv_wire (legato.yaml:1): must be same, float32, bfloat16, float16, int8 "
         "or fp8, got 'bf16': did you mean bfloat16?"),
        ("model: m\ndtype: half", "dtype (legato.yaml:2): must be auto, float32, bfloat16 or "
         "float16, got 'half': did you mean float16?"),
        ("kv-memory: 1GiB", "kv-memory (legato.yaml:1): is no setting of Legato's: did you mean "
         "kv_memory?"),
        ("max_model_len: 5", "max_model_len (legato.yaml:1): is no setting of Legato's: did you "
         "mean context_length?"),
        ("xyzzy: 5", "xyzzy (legato.yaml:1): is no setting of Legato's"),
        ("port: 70000", "port (legato.yaml:1): must be a whole number in [0, 65535], got '70000'"),
        ("prefill: true", "prefill (legato.yaml:1): must be a whole number in [0, 1024], got "
         "'true'"),
        ("restart: maybe", "restart (legato.yaml:1): must be true or false, got 'maybe'"),
        ("model: m\n\nmodel: n", "--config: legato.yaml:3: model is given twice, first at "
         "legato.yaml:1"),
        ("model: [a, b]", "--config: legato.yaml:1: model must be one value, got a list"),
        ("model: {a: b}", "model (legato.yaml:1): must be one value, got keys and values"),
        ("autoscale: {prefill: 1, prefill: 2}", "--config: legato.yaml:1: autoscale.prefill is "
         "given twice"),
        ("- model", "--config: legato.yaml:1: must hold keys and values"),
        ("a: &x 1\nb: *x", "--config: legato.yaml:1: anchors and aliases (& and *) are not taken"),
        ("a: {b: {c: d}}", "--config: legato.yaml:1: is nested too deep: 2 levels are the most"),
        ("model: !!python/object:os.system x", "--config: legato.yaml:1: model has the tag"),
        ("model: m\n  port: 1", "--config: legato.yaml:2: is no YAML: mapping values are not"),
        ("model: 'm", "--config: legato.yaml:1: is no YAML: while scanning a quoted scalar"),
        ("model: m\n---\nmodel: n", "--config: legato.yaml:2: is no YAML: expected a single"),
        ("model: \x00", "--config: legato.yaml: is no YAML: "),
        ("decode: 0\nmodel: m", "decode (legato.yaml:1): 0 serves nothing, whatever --prefill is"),
        ("model: m\nawait_nodes: 3", "await_nodes (legato.yaml:2): is for a joined cluster"),
        ("model: m\nttft_slo: 1s", "ttft_slo (legato.yaml:2): does nothing without --autoscale"),
        ("port: 1", "--model: is not given, nor is LEGATO_MODEL or `model:` in a --config file"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named_with_its_line(
    written: Callable[[str], Path], text: str, told: str
) -> None:
    assert refusal({}, written(text)).startswith(told)


def test_a_file_of_any_size_and_depth_is_refused_at_once(written: Callable[[str], Path]) -> None:
    path = written("a: " + "x" * yaml_settings.MAX_FILE_BYTES)
    assert "must have at most 65,536 bytes" in refusal({}, path)
    assert "nested too deep" in refusal({}, written("a: " + "[" * 60_000))
    assert "holds more than 4,096 parts" in refusal({}, written("a: x\n" * 5000))
    assert "--config: nothing.yaml: cannot be read: No such file" in refusal(
        {}, Path("nothing.yaml")
    )
    path.write_bytes(b"model: \xff")
    assert "is no UTF-8 text, from byte 7 on" in refusal({}, path)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("LEGATO_KV_MEMORY", "lots", "LEGATO_KV_MEMORY: must be a size such as"),
        ("LEGATO_DECODE", "0", "LEGATO_DECODE: 0 serves nothing, whatever --prefill is"),
        ("LEGATO_PORT", "tcp://10.0.0.1:50051", "LEGATO_PORT: must be a whole number in [0, 65535],"
         " got 'tcp://10.0.0.1:50051': Kubernetes sets it for a Service named legato"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    monkeypatch.setenv(name, value)
    assert refusal({"model": "m"}).startswith(told)


def test_the_bound_of_threads_is_this_machines_where_workers_are_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    assert load({"model": "m", "threads": "24"}, None).config.engine.num_threads == 24
    assert refusal({"model": "m", "threads": "25"}) == (
        "--threads: is 25, limit 24: 8 for each of this machine's 3 CPUs"
    )
    elsewhere = {"model": "m", "threads": "25", "ray_address": "head:6379"}
    assert load(elsewhere, None).config.engine.num_threads == 25


def test_variables_of_kubernetes_and_of_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT", "ROUTER_SERVICE_PORT_GRPC", "PORT_50051_TCP_ADDR"):
        monkeypatch.setenv(f"LEGATO_{name}", "10.0.0.1")
    monkeypatch.setenv("LEGATO_ROUTER_PORT", "tcp://10.0.0.1:50051")
    monkeypatch.setenv("LEGATO_ADDRESS", "h:1")
    check_variables(os.environ)
    assert load({"model": "m"}, None).places == {"model": "--model"}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LEGATO_KV_MEMRY", "LEGATO_KV_MEMORY"),
        ("LEGATO_ADRESS", "LEGATO_ADDRESS"),
        ("LEGATO_TOKENFILE", "LEGATO_TOKEN_FILE"),
    ],
)
@pytest.mark.parametrize(
    "words", [("status", "--port", "9"), ("certs", "."), ("config", "--model", "m")]
)
def test_every_command_refuses_a_variable_that_means_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    words: tuple[str, ...],
    name: str,
    meant: str,
) -> None:
    monkeypatch.setenv(name, "1")
    assert run(monkeypatch, *words) == 2
    assert capsys.readouterr().err.startswith(
        f"legato: Invalid value for {name}: is no variable of Legato's: did you mean {meant}? (see"
    )
    assert run(monkeypatch, words[0], "--help") == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stop", "--drain", "nan"), "'--drain': must be at most 600, got 'nan' (see"),
        (
            ("generate", "a", "--max-tokens", "0"),
            "'--max-tokens': must be at least 1, got '0' (see",
        ),
        (("generate", "a", "--top-k", "1.5"), "'--top-k': must be a whole number, got '1.5' (see"),
        (("bench", "--rate", "x"), "'--rate': must be a number, got 'x' (see"),
        (("config", "--model", ""), "--model: must not be empty: give folder, file or id (see"),
        (
            ("config", "--config", ""),
            "'--config' (env var: 'LEGATO_CONFIG'): must not be empty: give the name of a YAML",
        ),
        (
            ("config", "--config", "."),
            "--config: .: is a folder; give the name of a YAML file (see",
        ),
    ],
)
def test_wrong_values_are_told_of_in_words_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, words: tuple[str, ...], said: str
) -> None:
    assert run(monkeypatch, *words) == 2
    assert capsys.readouterr().err.startswith(f"legato: Invalid value for {said}")


@pytest.mark.parametrize("words", [("status",), ("batch", "in", "-o", "out"), ("generate", "a")])
def test_a_wrong_address_is_laid_to_the_variable_that_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("LEGATO_ADDRESS", "foo")
    assert run(monkeypatch, *words) == 2
    assert capsys.readouterr().err.startswith(
        "legato: Invalid value for LEGATO_ADDRESS: must be host:port"
    )
    assert run(monkeypatch, *words, "--address", "bar") == 2
    assert capsys.readouterr().err.startswith("legato: Invalid value for --address: must be")


def test_every_variable_that_the_program_or_its_tests_read_is_known() -> None:
    named = set()
    for folder in ("bench", "cluster", "kernels", "worker", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != Path(__file__):
                named |= set(re.findall(r'["\'](LEGATO_[A-Z_]+)["\']', path.read_text()))
    settings = {variable_of(name) for name in ServeSettings.model_fields}
    assert named <= OTHER_VARIABLES | settings
    assert not OTHER_VARIABLES & settings


def test_the_command_line_says_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, written: Callable[[str], Path]
) -> None:
    written("model: m\nkv_wire: bf16\n")
    assert run(monkeypatch, "serve", "--config", "legato.yaml") == 2
    assert capsys.readouterr().err == (
        "legato: Invalid value for kv_wire (legato.yaml:2): must be same, float32, bfloat16, "
        "float16, int8 or fp8, got 'bf16': did you mean bfloat16? (see `legato serve --help`)\n"
    )


def test_a_log_that_may_be_written_is_not_begun(tmp_path: Path) -> None:
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_text("a line\n")
    for path in (there, new):
        config = load({"model": "m", "request_log": str(path)}, None).config
        assert config.router.request_log == str(path)
    assert there.read_text() == "a line\n"
    assert not new.exists()
    with pytest.raises(SettingError, match=r"cannot append to '.*/no/log': No such file"):
        load({"model": "m", "request_log": str(tmp_path / "no" / "log")}, None)


def test_the_name_that_clients_know_a_model_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGATO_MODEL", "/models/m")
    assert load({}, None).config.public_model_name == "/models/m"
    assert load({"served_model_name": "org/m"}, None).config.public_model_name == "org/m"
    for wrong in ("a b", "", "é", "a" * 257):
        with pytest.raises(SettingError, match="must be 1 to 256 ASCII characters without") as told:
            load({"served_model_name": wrong}, None)
        assert told.value.name == "--served-model-name"


def test_options_variables_and_the_file_reach_the_service(
    monkeypatch: pytest.MonkeyPatch, written: Callable[[str], Path]
) -> None:
    configs = note_configs(monkeypatch)
    written("model: m\ndeterministic: true\nautoscale: prefill=1..2 decode=1..2\n")
    monkeypatch.setenv("LEGATO_CONFIG", "legato.yaml")
    monkeypatch.setenv("LEGATO_RESTART", "no")
    assert run(monkeypatch, "serve", "--no-deterministic", "--decode", "2") == 0
    (config,) = configs
    assert (config.model, config.restart, config.decode_workers) == ("m", False, 2)
    assert not config.engine.deterministic
    assert config.autoscale == AutoscaleOptions(PoolRange(1, 2), PoolRange(1, 2))


def test_config_shows_what_is_in_force_and_is_a_file_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, written: Callable[[str], Path]
) -> None:
    path = written(
        "model: 'm: #1'\nautoscale: {prefill: 1..4, decode: 2..3}\ndecode: 2\n"
        "decode_resources: {GPU: 0, memory: 16GiB, fast_gpu: 0.5, label:zone: '!b'}\n"
        "kv_memory: 5000\nitl_slo: 1234us\n"
    )
    assert run(monkeypatch, "config", "--config", "legato.yaml") == 2
    assert "itl_slo (legato.yaml:6): must be a duration" in capsys.readouterr().err
    path.write_text(path.read_text().replace("1234us", "1.234ms"))
    monkeypatch.setenv("LEGATO_PREFILL", "3")
    words = ("config", "--config", "legato.yaml", "--routers", "2", "--request-log", "log")
    assert run(monkeypatch, *words) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^prefill: 3 +# LEGATO_PREFILL$", shown, flags=re.MULTILINE)
    assert re.search(r"^routers: 2 +# --routers$", shown, flags=re.MULTILINE)
    assert re.search(r"^kv_memory: 5000 +# kv_memory \(legato\.yaml:5\)$", shown, flags=re.M)
    assert re.search(r"^# threads: +# default$", shown, flags=re.MULTILINE)
    before = load({"routers": "2", "request_log": "log"}, path).config
    path.write_text(shown)
    monkeypatch.delenv("LEGATO_PREFILL")
    assert load({}, path).config == before
    assert run(monkeypatch, *words, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["routers"] == {"value": "2", "source": "--routers"}
    assert told["threads"] == {"value": None, "source": "default"}


def test_what_is_shown_of_a_default_is_read_as_that_default() -> None:
    for name, field in ServeSettings.model_fields.items():
        if field.is_required() or not (text := value_text(field, field.default)):
            continue
        assert form_of(field).read(text) == field.default, name


def test_the_nearest_word() -> None:
    assert did_you_mean("int5", ("auto", "int8", "int4")) in (
        ": did you mean int8?",
        ": did you mean int4?",
    )
    assert did_you_mean("gpu", ("auto", "cpu", "cuda")) == ": did you mean cuda?"
    assert did_you_mean("zzz", ("auto", "cpu")) == ""


def test_the_page_of_settings_has_an_example_that_is_right(written: Callable[[str], Path]) -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    assert yaml.safe_load(example)["decode"] == 2
    assert load({}, written(example)).config.decode_resources == parse_demand(
        "GPU=0,CPU=16,label:zone=b"
    )
