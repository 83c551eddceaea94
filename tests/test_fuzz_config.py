"""Any file, any mapping and any command line: a configuration, or one line that says what is wrong.

`python -m pytest -m slow` runs it for ten minutes.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing import DURATIONS, fuzz
from hypothesis import given
from hypothesis import strategies as st

from dflash_ext.config import (
    TYPES,
    Config,
    UserError,
    from_dict,
    load_config,
    parse_config,
    save_config,
    to_dict,
    validate,
)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["null", "cpu", "cuda:0", "cuda:99", "off", "auto", "1e-3", "[1, 2]", "~", ".inf", "-0"]
    ),
    st.sampled_from([10**400, -(10**30), 2**63, 1e308, float("nan"), float("inf")]),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(SCALARS, inner, max_size=3)
)
FIELDS = st.sampled_from(sorted(TYPES))
NAMES = st.one_of(FIELDS, st.text(max_size=12), st.sampled_from(["model", "train.", ".", "x.y.z"]))
FRAGMENTS = st.sampled_from(
    [
        *(
            "model:",
            "train: {",
            "}",
            "[",
            "]",
            "- ",
            ": ",
            "&a",
            "*a",
            "<<: *a",
            "!!python/object:os",
        ),
        *("!!int x", "!!float", "%YAML 9", "---", "...", "'", '"', "|", ">", "#", "\t", "\ufeff"),
        *(
            "steps: 5",
            "lr: .nan",
            "? ",
            "\x00",
            "\x85",
            "2026-11-29",
            "0x1F",
            "1:30:00",
            "\n",
            "\n  ",
        ),
        *("[" * 2000, "9" * 5000, "{a: " * 1500, "a: &a [*a, *a]"),
    ]
)


def accept(make: Any) -> None:
    """Runs `make`; a UserError must be one line, and a result must come back from its YAML."""
    try:
        cfg = make()
        validate(cfg)
    except UserError as error:
        text = " ".join(str(error).split())
        assert "found" in text and "want" in text and len(text) < 6000, text  # a path may be long
        return
    assert repr(from_dict(to_dict(cfg))) == repr(cfg)  # repr: NaN equals itself


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = copy.deepcopy(to_dict(Config()))
    for name, value in changes.items():
        section, _, field = str(name).partition(".")
        if isinstance(data.get(section), dict) and field:
            data[section][field] = value
        else:
            data[section] = value
    return data


@DURATIONS
def test_files_mappings_and_command_lines(seconds: float, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    save_config(Config(), tmp_path / "default.yaml")
    whole = (tmp_path / "default.yaml").read_text()

    @given(st.dictionaries(NAMES, VALUES, max_size=4) | VALUES)
    def mappings(data: Any) -> None:
        accept(lambda: from_dict(changed(data) if isinstance(data, dict) else data))

    @given(st.data())
    def files(data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(["bytes", "fragments", "edited", "values"]))
        if kind == "bytes":
            path.write_bytes(data.draw(st.binary(max_size=80)))
        elif kind == "fragments":
            path.write_text("".join(data.draw(st.lists(FRAGMENTS, max_size=8))), "utf-8")
        elif kind == "edited":
            place = data.draw(st.integers(0, len(whole)))
            text = "".join(data.draw(st.lists(FRAGMENTS | st.text(max_size=5), max_size=3)))
            cut = data.draw(st.integers(0, 20))
            path.write_text(whole[:place] + text + whole[place + cut :], "utf-8", "replace")
        else:
            changes = data.draw(st.dictionaries(FIELDS, VALUES, max_size=3))
            try:
                path.write_text(yaml.safe_dump(changed(changes)), "utf-8", "replace")
            except (yaml.YAMLError, ValueError):  # what YAML cannot hold at all
                return
        accept(lambda: load_config(path))

    words = st.one_of(
        FIELDS.map("--{}".format),
        st.tuples(FIELDS, st.text(max_size=12) | FRAGMENTS).map("--{0[0]}={0[1]}".format),
        st.text(max_size=8),
        SCALARS.filter(lambda value: not (type(value) is int and abs(value) > 10**300)).map(str),
        st.sampled_from(["--config", f"--config={path}", "--resume", "--plan", "--print_config"]),
    )

    @given(st.lists(words, max_size=5))
    def lines(arguments: list[str]) -> None:
        path.write_text("")
        try:
            accept(lambda: parse_config(arguments)[0])
        except SystemExit as stop:
            assert stop.code == 0 and {"--print_config", "--help", "-h"} & set(arguments)

    for check in (mappings, files, lines):
        assert fuzz(check, seconds / 3) >= 100


HOSTILE = {
    "deep": "[" * 5000,
    "deeper": "{a: " * 5000,
    "digits": "train: {steps: " + "9" * 5000 + "}",
    "laughs": "train: {lr: [&a0 [x], "
    + ", ".join(f"&a{i + 1} [*a{i}, *a{i}]" for i in range(60))
    + "]}",
    "itself": "a: &a [*a]",
    "field": "train: {lr: &a [*a]}",
    "key": "? {a: 1}\n: 2",
    "object": "model: {target: !!python/object/apply:os.system ['true']}",
    "date": "train: {steps: 2026-11-29}",
    "float": "train: {lr: !!float }",
    "bool": "train: {recompute: !!bool x}",
    "control": "\x07",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError, match=r"(?s)found .*want"):
        load_config(tmp_path / "x.yaml")


@pytest.mark.parametrize("value", ["!!float", "!!bool x", "!!timestamp x", "9" * 5000, "[" * 5000])
@pytest.mark.parametrize("field", ["train.lr", "train.recompute", "topology.targets"])
def test_hostile_values(field: str, value: str) -> None:
    with pytest.raises(UserError, match=rf"{field}: found .*want"):
        parse_config([f"--{field}={value}"])


@pytest.mark.parametrize("value", ["-1e-05", "-x", "-", "-.inf"])
def test_values_that_start_with_a_dash(value: str) -> None:
    with pytest.raises(UserError, match=r"train\.lr: found .*, want "):
        parse_config(["--train.lr", value])


def test_a_switch_with_a_value() -> None:
    with pytest.raises(UserError, match="found '--plan=x', want --plan without a value"):
        parse_config(["--plan=x"])


@pytest.mark.parametrize("name", ["x" * 5000, "a\x00b"])
def test_a_name_that_no_file_can_have(name: str) -> None:
    with pytest.raises(UserError, match=r"(?s)found .*, want (a )?YAML"):
        parse_config(["--config", name])
